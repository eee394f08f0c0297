"""Training loops of PyTorch, over Horovod and over DistributedDataParallel; see programs.py."""

import textwrap

#: Where programs may differ from the simplest one, whatever the library.
BOTH = {
    "model": ("mlp", "conv", "tied", "sparse", "lstm", "attention", "norm"),
    "channels_last": (False, True),
    "dtype": ("float32", "bfloat16", "float16"),
    "optimizer": ("SGD", "momentum", "Adam", "AdamW", "Adagrad", "RMSprop"),
    "implementation": ("plain", "foreach", "fused"),
    "decay": (0.0, 0.01),
    "steps": (3, 5),
    "passes": (1, 2, 3),
    "clip": ("none", "norm", "value"),
    "closure": (False, True),
    "zero": ("none", "zeros", "module"),
    "scheduler": ("none", "after", "before"),
    "scaler": (False, True),
    "second": (False, True),
    "frozen": ("none", "always", "later", "until"),
    "unused": ("none", "everywhere", "on one rank", "now and then"),
    "kept": (False, True),
    "reload": (False, True),
    "spec": (
        "dense/raw",
        "dense/deflate",
        "topk:0.1/rice/raw",
        "topk:0.05/auto/lloyd:0.05",
        "dense/fp16",
        "dense/minmax",
        "topk:0.2:per=tensor/elias_fano/fp16",
    ),
    "memory": ("none", "residual"),
    "communicator": ("allgather", "sharded", "tree", "hierarchical", "allreduce"),
    "rules": (False, True),
    "selection": ("auto", "device"),
}
ONLY = {  # of each library
    "horovod": {
        "op": ("Average", "Sum"),
        "predivide": (1.0, 2.0),
        "bucket_bytes": (25 * 2**20, 4096, 1),
        "groups": (0, 2),
        "named": (True, False),
        "process_set": (False, True),
        "join": (False, True),
    },
    "ddp": {
        "bucket_cap_mb": (25, 0.01),
        "gradient_as_bucket_view": (False, True),
        "find_unused": (False, True),
        "static_graph": (False, True),
    },
}
#: Specs that change values. What is done by hand instead has every tensor in a container of its own.
LOSSY = frozenset(BOTH["spec"][2:])
#: What is sent as it is, and what torch operations select; `selection="device"` refuses others where there are no kernels.
ON_DEVICE = ("dense/raw", "topk:0.1/rice/raw", "topk:0.05/auto/lloyd:0.05")
CHOICES = {kind: BOTH | only for kind, only in ONLY.items()}


def settled(kind: str, program: dict, ranks: int) -> dict:
    """One pass over what does not go together, in the library or in the comparison: the simplest choice there."""
    p, known = dict(program), CHOICES[kind]

    def simplest(*names):
        p.update({name: known[name][0] for name in names if name in known})

    if ranks > 2:  # what a sum is rounded to can turn over a selection, a rounding, and what divides by tiny numbers
        simplest("dtype")
        if p["spec"] in LOSSY:
            simplest("spec", "memory")
        if p["optimizer"] not in ("SGD", "momentum"):
            p["optimizer"] = "momentum"
    if p["model"] != "conv":
        simplest("channels_last")
    if p["model"] in ("conv", "lstm", "attention"):
        simplest("dtype")
    if p["model"] == "sparse":  # what torch's optimizers take of sparse gradients, and what Horovod and GradScaler do
        simplest(
            "dtype",
            "passes",
            "clip",
            "scaler",
            "decay",
            "kept",
            "unused",
            "frozen",
            "selection",
            "op",
            "predivide",
            "join",
            "find_unused",
            "closure",
        )
        p["optimizer"] = {"SGD": "SGD", "momentum": "SGD"}.get(p["optimizer"], "Adagrad")
        p["implementation"] = "plain"
        if p["spec"] in LOSSY:
            simplest("spec", "memory")
        if kind == "ddp":
            simplest("gradient_as_bucket_view", "static_graph")
    if p["implementation"] == "fused" and (p["optimizer"] == "RMSprop" or p["frozen"] in ("later", "until")):
        simplest("implementation")  # torch's fused SGD takes no parameter that comes later
    if p["dtype"] != "float32":
        simplest("scaler", "closure", "clip", "predivide", "join", "kept", "unused", "frozen")
        if p["dtype"] == "float16" and p["optimizer"] != "SGD":  # the others divide by what float16 takes for zero
            p["optimizer"] = "momentum"
        if p["implementation"] == "fused":
            simplest("implementation")
    if p["closure"]:
        simplest("clip", "scaler", "passes", "join", "unused", "kept")
    if p["scaler"]:
        simplest("join", "second", "reload")
    if p.get("join"):
        simplest("process_set", "reload", "second", "frozen", "unused", "scheduler")
        if p["model"] == "conv":
            simplest("model", "channels_last")
    if p["frozen"] != "none":
        simplest("static_graph", "unused")
    if kind == "ddp":
        if p["frozen"] in ("later", "until"):  # DDP looks at requires_grad once
            p["frozen"] = "always"
        if p["unused"] != "none":
            p["find_unused"] = True
        if p["find_unused"]:
            simplest("static_graph")
        if p["passes"] > 1:
            simplest("static_graph")
    if p["communicator"] == "allreduce" and p["spec"] not in ("dense/raw", "dense/fp16"):
        simplest("communicator")
    if p["spec"] in LOSSY:
        simplest("predivide", "join", "dtype", "scaler", "groups", "communicator")
        if p["second"]:
            simplest("reload")
        if p["frozen"] in ("later", "until"):
            simplest("frozen")
        if kind == "horovod":
            p["bucket_bytes"] = 1
        elif p["spec"] != "dense/fp16":  # DDP's buckets have several tensors
            p["spec"] = "topk:0.2:per=tensor/elias_fano/fp16"
    if p["spec"] not in ON_DEVICE:
        simplest("selection")
    if p.get("groups"):
        simplest("bucket_bytes")
        if p["frozen"] != "none":
            simplest("groups")
    if ranks < 3 or _is_by_hand(p):  # Horovod gathers objects of all ranks only
        simplest("process_set")
    return p


# The script

_MODELS = {
    "mlp": (
        """
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(40, 60), torch.nn.Linear(60, 50)
            self.last = torch.nn.Linear(50, 10)

        def body(self, x):
            return torch.relu(self.second(torch.relu(self.first(x))))
        """,
        "torch.randn(6, 40, generator=data)",
    ),
    "conv": (
        """
        def __init__(self):
            super().__init__()
            self.first, self.norm = torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16)
            self.second = torch.nn.Conv2d(16, 16, 3)
            self.last = torch.nn.Linear(16 * 4 * 4, 10)

        def body(self, x):
            return torch.relu(self.second(torch.relu(self.norm(self.first(x))))).flatten(1)
        """,
        "torch.randn(6, 3, 8, 8, generator=data)",
    ),
    "tied": (
        """
        def __init__(self):
            super().__init__()
            self.table, self.middle = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 32)
            self.out = torch.nn.Linear(32, 50, bias=False)
            self.out.weight = self.table.weight
            self.last = torch.nn.Linear(50, 10)

        def body(self, x):
            return self.out(torch.relu(self.middle(self.table(x).mean(dim=1))))
        """,
        "torch.randint(0, 50, (6, 7), generator=data)",
    ),
    "sparse": (
        """
        def __init__(self):
            super().__init__()
            self.table, self.middle = torch.nn.Embedding(200, 24, sparse=True), torch.nn.Linear(24, 50)
            self.last = torch.nn.Linear(50, 10)

        def body(self, x):
            return torch.relu(self.middle(self.table(x).mean(dim=1)))
        """,
        "torch.randint(0, 200, (6, 7), generator=data)",
    ),
    "lstm": (
        """
        def __init__(self):
            super().__init__()
            self.table, self.lstm = torch.nn.Embedding(50, 20), torch.nn.LSTM(20, 24, 2, batch_first=True)
            self.last = torch.nn.Linear(24, 10)

        def body(self, x):
            return self.lstm(self.table(x))[0][:, -1]
        """,
        "torch.randint(0, 50, (6, 7), generator=data)",
    ),
    "attention": (
        """
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(50, 32)
            self.block = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            self.last = torch.nn.Linear(32, 10)

        def body(self, x):
            return self.block(self.table(x)).mean(dim=1)
        """,
        "torch.randint(0, 50, (6, 7), generator=data)",
    ),
    "norm": (
        """
        def __init__(self):
            super().__init__()
            self.first, self.norm = torch.nn.Linear(40, 64), torch.nn.LayerNorm(64)
            self.scale, self.number = torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.tensor(1.0))
            self.last = torch.nn.Linear(64, 10)

        def body(self, x):
            return torch.tanh(self.norm(self.first(x)) * self.scale * self.number)
        """,
        "torch.randn(6, 40, generator=data)",
    ),
}
_OPTIMIZERS = {
    "SGD": "SGD({}, lr=0.05",
    "momentum": "SGD({}, lr=0.05, momentum=0.9, nesterov=True",
    "Adam": "Adam({}, lr=0.01",
    "AdamW": "AdamW({}, lr=0.01",
    "Adagrad": "Adagrad({}, lr=0.05",
    "RMSprop": "RMSprop({}, lr=0.01",
}


def source(kind: str, program: dict, ranks: int) -> str:
    """The script, to be started with `launcher`."""
    p = program
    parts = [_imports(kind), _net(p), _train(kind, p), _wraps(kind, p), _ending(kind, p, ranks)]
    return "\n\n\n".join(parts) + "\n"


def _block(text: str, depth: int = 0) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), "    " * depth)


def _imports(kind: str) -> str:
    if kind == "horovod":
        return _block("""
            import contextlib
            import copy
            import types

            import horovod.torch as hvd
            import numpy as np
            import torch

            import grace_ext
            from grace_ext.adapters.horovod_torch import DistributedOptimizer
            """)
    return _block("""
        import contextlib
        import copy

        import numpy as np
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import grace_ext
        from grace_ext.adapters.torch_ddp import CompressionState, comm_hook
        """)


def _net(p: dict) -> str:
    members, _ = _MODELS[p["model"]]
    forward = "return self.last(self.body(x))"
    extra = ""
    if p["unused"] != "none":
        extra = "\n        self.extra = torch.nn.Linear(10, 10)"
        if p["unused"] == "on one rank":
            forward = "return self.extra(self.last(self.body(x))) if rank == 0 else self.last(self.body(x))"
        elif p["unused"] == "now and then":
            forward = "return self.extra(self.last(self.body(x))) if (rank + step) % 3 else self.last(self.body(x))"
    body = _block(members, 1).replace("\n\n    def body", extra + "\n\n    def body")
    return f"class Net(torch.nn.Module):\n{body}\n\n    def forward(self, x, rank, step):\n        {forward}"


def _optimizer(p: dict, parameters: str) -> str:
    options = "" if p["implementation"] == "plain" else f", {p['implementation']}=True"
    decay = f", weight_decay={p['decay']}" if p["decay"] else ""
    return f"torch.optim.{_OPTIMIZERS[p['optimizer']].format(parameters)}{decay}{options})"


def _build(kind: str, p: dict, number: str = "") -> list[str]:
    """Statements that make net and optimizer, wrapped."""
    lines = [f"net{number} = Net()"]
    if p["channels_last"]:
        lines.append(f"net{number} = net{number}.to(memory_format=torch.channels_last)")
    if p["dtype"] != "float32":
        lines.append(f"net{number} = net{number}.to(torch.{p['dtype']})")
    if p["frozen"] in ("always", "until"):
        lines.append(f"net{number}.last.weight.requires_grad_(False)")
    if kind == "ddp":
        lines.append(f"model{number}, wrapped{number} = wrap(net{number}{', scaler' if p['scaler'] else ''})")
    trained = f"net{number}.parameters()"
    if p["frozen"] == "always":
        trained = f"(p for p in {trained} if p.requires_grad)"
    lines.append(f"optimizer{number} = {_optimizer(p, trained)}")
    if p["scheduler"] == "before":
        lines.append(f"scheduler{number} = torch.optim.lr_scheduler.StepLR(optimizer{number}, 2, 0.5)")
    if kind == "horovod":
        passed = f"net{number}.named_parameters()" if p["named"] else "None"
        if number and p["named"]:
            passed = f"[('second.' + name, p) for name, p in {passed}]"
        scaler = ", scaler=scaler" if p["scaler"] else ""
        lines.append(f"optimizer{number} = wrap(optimizer{number}, {passed}{scaler})")
    if p["scheduler"] == "after":
        lines.append(f"scheduler{number} = torch.optim.lr_scheduler.StepLR(optimizer{number}, 2, 0.5)")
    return lines


def _train(kind: str, p: dict) -> str:
    _, batch = _MODELS[p["model"]]
    if p["channels_last"]:
        batch = f"{batch}.to(memory_format=torch.channels_last)"
    cast = f".to(torch.{p['dtype']})" if p["dtype"] != "float32" and p["model"] in ("mlp", "norm") else ""
    numbers = ["", "2"] if p["second"] else [""]
    lines = ["torch.manual_seed(1)"]
    if p["scaler"]:
        lines.append('scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)')
    for number in numbers:
        lines += _build(kind, p, number)
    lines += ["data = torch.Generator().manual_seed(100 + rank)", "kept = []"]
    steps = f"{p['steps']} + rank" if p.get("join") else str(p["steps"])
    lines.append(f"for step in range({steps}):")
    body = []
    if p["reload"]:
        body.append("if step == 2:")
        for number in numbers:
            saved = f"copy.deepcopy((net{number}.state_dict(), optimizer{number}.state_dict()))"
            states = f"states{number}"
            body.append(f"    {states} = {saved}")
            if kind == "ddp":
                body.append(f"    hook{number} = copy.deepcopy(wrapped{number}.state_dict()) if wrapped{number} else None")
            body += [f"    {line}" for line in _build(kind, p, number)]
            body += [f"    net{number}.load_state_dict({states}[0])", f"    optimizer{number}.load_state_dict({states}[1])"]
            if kind == "ddp":
                body += [f"    if wrapped{number}:", f"        wrapped{number}.load_state_dict(hook{number})"]
    if p["frozen"] in ("later", "until"):
        body.append(f"if step == 2:\n    net.last.weight.requires_grad_({p['frozen'] == 'until'})")
    for number in numbers:
        body += _step(kind, p, number, batch, cast)
        if p["scheduler"] != "none":
            body.append(f"scheduler{number}.step()")
    lines.append(textwrap.indent("\n".join(body), "    "))
    if p.get("join"):
        lines.append("join(optimizer)")
    results = " + ".join(f"[p.detach().clone() for p in net{number}.parameters()]" for number in numbers)
    lines.append(f"return {results} + kept")
    head = "def train(wrap, rank, join=None, with_closure=False):" if kind == "horovod" else "def train(wrap, rank):"
    return head + "\n" + textwrap.indent("\n".join(lines), "    ")


def _step(kind: str, p: dict, number: str, batch: str, cast: str) -> list[str]:
    """Statements of one step."""
    model = f"net{number}" if kind == "horovod" else f"model{number}"
    zero = {
        "none": f"optimizer{number}.zero_grad()",
        "zeros": f"net{number}.zero_grad(set_to_none=False)",
        "module": f"net{number}.zero_grad()",
    }[p["zero"]]
    made = [f"x = {batch}{cast}", "y = torch.randint(0, 10, (6,), generator=data)"]
    loss = f"torch.nn.functional.cross_entropy({model}(x, rank, step), y)"
    lines = [zero]
    if p["closure"]:
        lines += [*made, "def closure():", f"    {zero}", f"    loss = {loss}", "    loss.backward()", "    return loss"]
        if kind == "horovod":  # Horovod's own would step with the gradients of this rank
            return [
                *lines,
                "if with_closure:",
                f"    optimizer{number}.step(closure)",
                "else:",
                "    closure()",
                f"    optimizer{number}.step()",
            ]
        return [*lines, f"optimizer{number}.step(closure)"]
    backward = f"scaler.scale({loss}).backward()" if p["scaler"] else f"{loss}.backward()"
    if p["passes"] > 1:
        inner = [*made, backward]
        if kind == "ddp":
            inner = [
                f"with {model}.no_sync() if turn < {p['passes'] - 1} else contextlib.nullcontext():",
                *(f"    {line}" for line in inner),
            ]
        lines += [f"for turn in range({p['passes']}):", *(f"    {line}" for line in inner)]
    else:
        lines += [*made, backward]
    clip = {
        "none": [],
        "norm": [f"torch.nn.utils.clip_grad_norm_(net{number}.parameters(), 0.05)"],
        "value": [f"torch.nn.utils.clip_grad_value_(net{number}.parameters(), 0.01)"],
    }[p["clip"]]
    step = [f"optimizer{number}.step()"]
    if p["scaler"]:
        step = [f"scaler.step(optimizer{number})", "scaler.update()"]
        clip = [f"scaler.unscale_(optimizer{number})", *clip]
    if clip and kind == "horovod":
        lines += [
            f"optimizer{number}.synchronize()",
            *clip,
            f"with optimizer{number}.skip_synchronize():",
            f"    {step[0]}",
            *step[1:],
        ]
    else:
        lines += [*clip, *step]
    if p["kept"]:
        if p["zero"] == "zeros":
            lines.append(f"kept += [p.grad.clone() for p in net{number}.parameters() if p.grad is not None]")
        else:
            lines.append(f"kept += [p.grad for p in net{number}.parameters() if p.grad is not None]")
    return lines


def _options(kind: str, p: dict) -> str:
    """What our wrapper is told."""
    options = {"communicator": p["communicator"], "selection": p["selection"]}
    if p["rules"]:
        options["rules"] = {"*last*": "dense/raw"}
    if kind == "horovod":
        options["bucket_bytes"] = p["bucket_bytes"]
        if p["groups"]:
            options["num_groups"] = p["groups"]
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


_BY_HAND = """
    class ByHand:
        \"""What should become of a gradient: every tensor by itself, on every rank the sum of what all ranks sent.\"""

        def __init__(self, spec, memory, rules, residuals):
            self.rules, self.memory, self.residuals = grace_ext.policy.Rules(spec, rules), memory, residuals

        def average(self, name, gradient, gather, weight):
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            compressor = self.rules.choose(name, gradient.numel(), gradient.dim())
            wanted = gradient.detach().float().contiguous().flatten().numpy()
            if compressor == self.rules.small:
                sent, restore = wanted, lambda received: received
            else:
                wanted = wanted + self.residuals.get(name, np.float32(0))
                sent = compressor.compress(wanted)
                restore = lambda received: grace_ext.decompress(received, wanted.size)
                if self.memory == "residual":
                    self.residuals[name] = wanted - restore(sent)
            total = np.zeros(wanted.size, np.float32)
            for received in gather(sent):
                total += restore(received)
            averaged = torch.from_numpy(total * np.float32(weight)).view(gradient.shape)
            return torch.empty_like(gradient).copy_(averaged)  # with its strides, which fused optimizers rely on
    """


def _is_by_hand(p: dict) -> bool:
    """Whether the plain library has no such thing, or does something else: Horovod has no bfloat16, sums float16 in float16,
    refuses channels-last gradients, and takes no notice of parameters that are frozen or unfrozen after it was made; a
    scheduler made before it takes none of a state that is loaded."""
    return (
        p["spec"] in LOSSY
        or p["dtype"] != "float32"
        or p["frozen"] in ("later", "until")
        or "op" in p
        and (p["scheduler"] == "before" and p["reload"] or p["channels_last"])
    )


def _wraps(kind: str, p: dict) -> str:
    """The functions `ours` and `plain`."""
    rules = {"*last*": "dense/raw"} if p["rules"] else None
    # What is saved of our optimizers has the residuals; here they stay where they are.
    hand = f"ByHand({p['spec']!r}, {p['memory']!r}, {rules!r}, {'RESIDUALS' if p['reload'] else '{}'})"
    residuals = ["RESIDUALS = {}"] if p["reload"] else []
    of_kind = {"horovod": _horovod_wraps, "ddp": _ddp_wraps}[kind]
    ours, plain, by_hand = map(_block, of_kind(p, hand))
    return "\n\n\n".join([*residuals, _block(_BY_HAND), ours, by_hand] if _is_by_hand(p) else [ours, plain])


def _horovod_wraps(p: dict, hand: str) -> tuple[str, str, str]:
    common = []
    if p["op"] == "Sum":
        common.append("op=hvd.Sum")
    elif p["predivide"] != 1.0:
        common.append(f"gradient_predivide_factor={p['predivide']}")
    if p["process_set"]:
        common.append("process_set=SOME")
    if p["passes"] > 1:
        common.append(f"backward_passes_per_step={p['passes']}")
    options = ", ".join(
        [
            "optimizer",
            "named",
            repr(p["spec"]),
            *common,
            f"memory={p['memory']!r}",
            _options("horovod", p),
            *(["grad_scaler=scaler"] if p["scaler"] else []),
        ]
    )
    among = "SOME" if p["process_set"] else "hvd.global_process_set"
    weight = "1.0" if p["op"] == "Sum" else f"1.0 / {among}.size()"
    return (
        f"""
        def ours(optimizer, named, scaler=None):
            return DistributedOptimizer({options})
        """,
        f"""
        def plain(optimizer, named, scaler=None):
            return hvd.DistributedOptimizer({", ".join(["optimizer", "named", *common])})
        """,
        f"""
        def plain(optimizer, named, scaler=None):
            if named is None:
                named = [(f"group0.{{i}}", p) for i, p in enumerate(optimizer.param_groups[0]["params"])]
            named, hand, step, skipping = list(named), {hand}, optimizer.step, []

            def gather(array):
                return hvd.allgather_object(array)

            def synchronize():
                for name, p in named:
                    if p.requires_grad:
                        p.grad = hand.average(name, torch.zeros_like(p) if p.grad is None else p.grad, gather, {weight})

            @contextlib.contextmanager
            def skip_synchronize():
                skipping.append(True)
                yield
                skipping.clear()

            def synchronize_and_step(self):
                if not skipping:
                    synchronize()
                return step()

            optimizer.synchronize, optimizer.skip_synchronize = synchronize, skip_synchronize
            optimizer.step = types.MethodType(synchronize_and_step, optimizer)
            return optimizer
        """,
    )


def _ddp_wraps(p: dict, hand: str) -> tuple[str, str, str]:
    of_ddp = {
        "bucket_cap_mb": p["bucket_cap_mb"],
        "gradient_as_bucket_view": p["gradient_as_bucket_view"],
        "find_unused_parameters": p["find_unused"],
        "static_graph": p["static_graph"],
    }
    model = f"DistributedDataParallel(net, {', '.join(f'{name}={value}' for name, value in of_ddp.items() if value)})"
    options = ", ".join(
        [
            "net.named_parameters()",
            repr(p["spec"]),
            f"memory={p['memory']!r}",
            _options("ddp", p),
            *(["grad_scaler=scaler"] if p["scaler"] else []),
        ]
    )
    return (
        f"""
        def ours(net, scaler=None):
            model = {model}
            state = CompressionState({options})
            model.register_comm_hook(state, comm_hook)
            return model, state
        """,
        f"""
        def plain(net, scaler=None):
            return {model}, None
        """,
        f"""
        def plain(net, scaler=None):
            model, hand, ranks = {model}, {hand}, dist.get_world_size()
            names = {{id(p): name for name, p in net.named_parameters()}}

            def gather(array):
                gathered = [None] * ranks
                dist.all_gather_object(gathered, array)
                return gathered

            def hook(_, bucket):
                for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    gradient.copy_(hand.average(names[id(p)], gradient, gather, 1.0 / ranks))
                future = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future

            model.register_comm_hook(None, hook)
            return model, None
        """,
    )


_COMPARE = """
    def compare(ours, plain):
        \"""Of two ranks each element is one sum, in whatever order; of more, the order decides how it is rounded.\"""
        assert len(ours) == len(plain), f"{{len(ours)}} tensors, and {{len(plain)}} of the plain loop"
        for number, (a, b) in enumerate(zip(ours, plain, strict=True)):
            what = f"tensor {{number}} of {{tuple(a.shape)}}, {{a.dtype}},"
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{{what}} is {{tuple(b.shape)}}, {{b.dtype}} plainly"
            assert {same}, f"{{what}} differs by {{(a.double() - b.double()).abs().max():.3g}}"
    """
_MAIN = {
    "horovod": """
    def check():
        if {taking_part}:
            plainly = train(plain, hvd.rank(), join=lambda _: hvd.join())
            compare(train(ours, hvd.rank(), join=lambda optimizer: optimizer.join(), with_closure=True), plainly)


    if __name__ == "__main__":
        hvd.init(process_sets="dynamic")
        torch.set_num_threads(1)
        if hvd.size() > 2:
            SOME = hvd.add_process_set([0, 1])
        check()
        print("no difference")
    """,
    "ddp": """
    def check():
        plainly = train(plain, dist.get_rank())
        compare(train(ours, dist.get_rank()), plainly)


    if __name__ == "__main__":
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        check()
        print("no difference")
        dist.destroy_process_group()  # else Gloo's threads end with the process, which aborts now and then
    """,
}


def _ending(kind: str, p: dict, ranks: int) -> str:
    exact = p["model"] != "sparse" and ranks == 2
    same = "torch.equal(a, b)" if exact else "torch.allclose(a, b, rtol=1e-4, atol=1e-5)"
    taking_part = "hvd.rank() in (0, 1)" if p.get("process_set") else "True"
    return _block(_COMPARE.format(same=same)) + "\n\n\n" + _block(_MAIN[kind].replace("{taking_part}", taking_part))

"""Training loops of TensorFlow over Horovod: tapes, Keras optimizers of Keras 3 and tf_keras, and `fit`; see programs.py.

Horovod's own wrappers do nothing, or fail, with Keras 3, so the plain loop takes the mean of the gradients by hand.
"""

import textwrap

CHOICES = {
    "tensorflow": {
        "model": ("mlp", "embedding", "conv", "lstm"),
        "way": ("tape", "optimizer", "fit"),
        "keras": ("keras", "tf_keras"),
        "graph": (False, True),
        "optimizer": ("SGD", "momentum", "Adam", "Adagrad", "RMSprop"),
        "clip": ("none", "clipnorm", "global_clipnorm", "clipvalue"),
        "steps": (3, 5),
        "passes": (1, 2),
        "averaged": (False, True),
        "op": ("Average", "Sum"),
        "predivide": (1.0, 2.0),
        "sparse_as_dense": (False, True),
        "unused": (False, True),
        "frozen": (False, True),
        "second": (False, True),
        "spec": (
            "dense/raw",
            "dense/deflate",
            "topk:0.1/rice/raw",
            "topk:0.05/auto/lloyd:0.05",
            "dense/fp16",
            "dense/minmax",
        ),
        "memory": ("none", "residual"),
        "communicator": ("allgather", "sharded", "tree", "hierarchical", "allreduce"),
        "rules": (False, True),
        "bucket_bytes": (25 * 2**20, 4096, 1),
        "groups": (0, 2),
        "process_set": (False, True),
    }
}
LOSSY = frozenset(CHOICES["tensorflow"]["spec"][2:])


def settled(kind: str, program: dict, ranks: int) -> dict:
    """One pass over what does not go together, in the library or in the comparison: the simplest choice there."""
    p, known = dict(program), CHOICES[kind]

    def simplest(*names):
        p.update({name: known[name][0] for name in names})

    if ranks < 3:
        simplest("process_set")
    if ranks > 2 or p["way"] == "fit" or p["graph"]:  # sums, and what TensorFlow makes of a graph, are rounded otherwise
        if p["spec"] in LOSSY:
            simplest("spec", "memory")
        if p["optimizer"] not in ("SGD", "momentum"):
            simplest("optimizer")
    if p["way"] == "tape":
        simplest("passes", "averaged")
    if p["way"] == "fit":
        simplest("graph", "second", "process_set", "unused")
    if p["passes"] > 1:
        simplest("unused", "clip")
        if p["optimizer"] == "Adam":  # its correction of the bias counts every call
            simplest("optimizer")
    else:
        simplest("averaged")
    if p["model"] != "embedding":
        simplest("sparse_as_dense")
    elif p["spec"] in LOSSY and not p["sparse_as_dense"]:
        simplest("spec", "memory")
    if p["op"] == "Sum":
        simplest("predivide")
    if p["communicator"] == "allreduce" and p["spec"] != "dense/raw":
        simplest("communicator")
    if p["spec"] in LOSSY:
        simplest("predivide", "groups", "communicator")
        p["bucket_bytes"] = 1  # by hand, every tensor is in a container of its own
    if p["groups"]:
        simplest("bucket_bytes", "frozen", "unused")
    return p


_MODELS = {
    "mlp": (
        """
        x = inputs = layers.Input((40,))
        x = layers.Dense(60, "relu")(x)
        x = layers.Dense(50, "relu")(x)
        """,
        "random.standard_normal((6, 40)).astype(np.float32)",
    ),
    "embedding": (
        """
        x = inputs = layers.Input((7,), dtype="int32")
        x = layers.GlobalAveragePooling1D()(layers.Embedding(100, 24)(x))
        x = layers.Dense(50, "relu")(x)
        """,
        "random.integers(0, 100, (6, 7)).astype(np.int32)",
    ),
    "conv": (
        """
        x = inputs = layers.Input((8, 8, 3))
        x = layers.Conv2D(16, 3, activation="relu")(x)
        x = layers.Flatten()(layers.Conv2D(16, 3, activation="relu")(x))
        """,
        "random.standard_normal((6, 8, 8, 3)).astype(np.float32)",
    ),
    "lstm": (
        """
        x = inputs = layers.Input((7, 12))
        x = layers.LSTM(24)(x)
        """,
        "random.standard_normal((6, 7, 12)).astype(np.float32)",
    ),
}
_OPTIMIZERS = {
    "SGD": "SGD(0.05",
    "momentum": "SGD(0.05, momentum=0.9",
    "Adam": "Adam(0.01",
    "Adagrad": "Adagrad(0.05",
    "RMSprop": "RMSprop(0.01",
}
_CLIPS = {
    "none": "",
    "clipnorm": ", clipnorm=0.05",
    "global_clipnorm": ", global_clipnorm=0.1",
    "clipvalue": ", clipvalue=0.01",
}


def source(kind: str, p: dict, ranks: int) -> str:
    """The script, to be started by mpirun or horovodrun."""
    return (
        "\n\n\n".join(
            [_block(_IMPORTS.replace("KERAS", p["keras"])), _model(p), _block(_BY_HAND), _train(p), _ending(p, ranks)]
        )
        + "\n"
    )


def _block(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


_IMPORTS = """
    import horovod.tensorflow as hvd
    import KERAS as keras
    import numpy as np
    import tensorflow as tf

    import grace_ext
    from grace_ext.adapters.horovod_tensorflow import DistributedGradientTape, DistributedOptimizer

    layers = keras.layers
    """


def _model(p: dict) -> str:
    body, _ = _MODELS[p["model"]]
    frozen = "\n    model.layers[-1].trainable = False" if p["frozen"] else ""
    optimizer = f"keras.optimizers.{_OPTIMIZERS[p['optimizer']]}{_CLIPS[p['clip']]})"
    return (
        f"def build():\n    keras.utils.set_random_seed(1)\n{textwrap.indent(_block(body), '    ')}\n"
        f"    model = keras.Model(inputs, layers.Dense(10)(x)){frozen}\n    return model, {optimizer}"
    )


_BY_HAND = """
    class ByHand:
        \"""What should become of gradients: every tensor by itself, on every rank the sum of what all ranks sent.\"""

        def __init__(self, number):
            self.number, self.rules, self.residuals = number, grace_ext.policy.Rules(SPEC, RULES), {}

        def mean(self, gradients):
            return [None if gradient is None else self.mean_of(str(name), tf.convert_to_tensor(gradient))
                    for name, gradient in enumerate(gradients)]

        def mean_of(self, name, gradient):
            size = int(np.prod(gradient.shape))
            compressor = self.rules.choose(name, size, len(gradient.shape))
            if compressor in (self.rules.small, grace_ext.compressor("dense/deflate")):
                return WEIGHT * hvd.allreduce(gradient, op=hvd.Sum, name=f"by_hand.{self.number}.{name}", process_set=AMONG)
            wanted = gradient.numpy().flatten() + self.residuals.get(name, np.float32(0))
            sent = compressor.compress(wanted)
            if MEMORY == "residual":
                self.residuals[name] = wanted - grace_ext.decompress(sent, size)
            total = np.zeros(size, np.float32)
            for received in hvd.allgather_object(sent, name=f"by_hand.{self.number}.{name}"):
                total += grace_ext.decompress(received, size)
            return tf.constant((total * np.float32(WEIGHT)).reshape(gradient.shape))
    """


def _train(p: dict) -> str:
    _, batch = _MODELS[p["model"]]
    numbers = ("1", "2") if p["second"] else ("1",)
    options = [
        repr(p["spec"]),
        f"memory={p['memory']!r}",
        f"communicator={p['communicator']!r}",
        f"bucket_bytes={p['bucket_bytes']}",
    ]
    options += ["rules=RULES"] * p["rules"] + ["op=hvd.Sum"] * (p["op"] == "Sum") + ["process_set=AMONG"] * p["process_set"]
    options += [f"num_groups={p['groups']}"] * bool(p["groups"]) + ["sparse_as_dense=True"] * p["sparse_as_dense"]
    options += [f"gradient_predivide_factor={p['predivide']}"] * (p["predivide"] != 1.0)
    wrapped = [
        *options,
        *[f"backward_passes_per_step={p['passes']}"] * (p["passes"] > 1),
        *["average_aggregated_gradients=True"] * p["averaged"],
    ]
    options, wrapped = (", ".join(["compression=" + all_[0], *all_[1:]]) for all_ in (options, wrapped))
    data = f"x, y = {batch}, random.integers(0, 10, 6)"
    if p["way"] == "fit":
        return _block(f"""
            def train(ours, rank):
                random = np.random.default_rng(100 + rank)
                x = np.concatenate([{batch} for _ in range({p["steps"] * p["passes"]})])
                y = random.integers(0, 10, len(x))
                model, optimizer = build()
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                if ours:
                    model.compile(DistributedOptimizer(optimizer, {wrapped}), loss, jit_compile=False)
                    model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
                    return model.get_weights()
                hand = ByHand(1)
                for step in range({p["steps"]}):
                    total = None
                    for turn in range({p["passes"]}):
                        part = slice(6 * ({p["passes"]} * step + turn), 6 * ({p["passes"]} * step + turn + 1))
                        with tf.GradientTape() as tape:
                            value = loss(y[part], model(x[part], training=True))
                        gradients = tape.gradient(value, model.trainable_variables)
                        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
                        total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
                    {"total = [gradient / %d for gradient in total]" % p["passes"] if p["averaged"] else "pass"}
                    optimizer.apply_gradients(zip(hand.mean(total), model.trainable_variables, strict=True))
                return model.get_weights()
            """)
    lines = ["random = np.random.default_rng(100 + rank)"]
    for number in numbers:
        lines += [f"model{number}, optimizer{number} = build()", f"hand{number}, saved{number} = ByHand({number}), []"]
        if p["way"] == "optimizer":
            lines += ["if ours:", f"    optimizer{number} = DistributedOptimizer(optimizer{number}, {wrapped})"]
    lines.append("loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)")
    for number in numbers:
        unused = f"{'[*' if p['unused'] else ''}model{number}.trainable_variables{', unused]' if p['unused'] else ''}"
        if p["unused"]:
            lines.append(f"unused = tf.Variable(tf.ones((60, 60)), name='unused{number}')")
        decorators = ["@tf.function"] if p["graph"] else []
        lines += [
            f"variables{number} = {unused}",
            f"optimizer{number}.build(variables{number})",
            "",
            *decorators,
            f"def gradients{number}(x, y):",
            "    with tf.GradientTape() as tape:",
            f"        value = loss(y, model{number}(x, training=True))",
        ]
        if p["way"] == "tape":
            lines += ["    if ours:", f"        tape = DistributedGradientTape(tape, {options})"]
        lines += [
            f"    return tape.gradient(value, variables{number})",
            "",
            *decorators,
            f"def apply{number}(gradients):",
            f"    pairs = zip(gradients, variables{number}, strict=True)",
            f"    optimizer{number}.apply_gradients([(g, v) for g, v in pairs if g is not None])",
            "",
        ]
    turns = p["passes"]
    lines.append(f"for step in range({p['steps'] * turns}):")
    for number in numbers:
        lines += [f"    {data}", f"    found = gradients{number}(x, y)"]
        if p["way"] == "optimizer":
            lines += ["    if ours:", f"        apply{number}(found)", "        continue" if number == numbers[-1] else ""]
        else:
            lines += [f"    apply{number}(found if ours else hand{number}.mean(found))"]
            continue
        keep = "else:" if number != numbers[-1] else ""
        inner = [
            f"saved{number}.append([None if g is None else tf.convert_to_tensor(g) for g in found])",
            f"if len(saved{number}) == {turns}:",
            f"    total = [None if g[0] is None else sum(g[1:], g[0]){f' / {turns}' if p['averaged'] else ''} "
            f"for g in zip(*saved{number}, strict=True)]",
            f"    saved{number}.clear()",
            f"    apply{number}(hand{number}.mean(total))",
        ]
        lines += [f"    {keep}", *(f"        {line}" for line in inner)] if keep else [f"    {line}" for line in inner]
    lines.append("return " + " + ".join(f"[v.numpy() for v in variables{number}]" for number in numbers))
    return "def train(ours, rank):\n" + textwrap.indent("\n".join(lines), "    ")


def _ending(p: dict, ranks: int) -> str:
    exact = ranks == 2 and p["model"] != "embedding" and not p["graph"] and p["way"] != "fit"
    same = "np.array_equal(a, b)" if exact else "np.allclose(a, b, rtol=1e-4, atol=1e-5)"
    among = "SOME" if p["process_set"] else "hvd.global_process_set"
    weight = "1.0" if p["op"] == "Sum" else "1.0 / AMONG.size()"
    rules = {"<=600": "dense/raw"} if p["rules"] else None
    return _block(f"""
        def check():
            global AMONG, WEIGHT
            AMONG = {among}
            WEIGHT = {weight}
            if AMONG.included():
                plain = train(False, hvd.rank())
                for number, (a, b) in enumerate(zip(train(True, hvd.rank()), plain, strict=True)):
                    assert {same}, f"variable {{number}} of shape {{a.shape}} differs by {{np.abs(a - b).max():.3g}}"


        SPEC, MEMORY, RULES = {p["spec"]!r}, {p["memory"]!r}, {rules!r}

        if __name__ == "__main__":
            hvd.init(process_sets="dynamic")
            if hvd.size() > 2:
                SOME = hvd.add_process_set([0, 1])
            check()
            print("no difference")
        """)

"""What is checked inside the ranks of one job: what becomes of results that DDP leaves out, or that no step takes."""

import contextlib

import torch
import torch.distributed as dist
from harness import EACH, batches, close, flat, loss_of, module, same_on_all_ranks, wrap
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError

UNUSED = {"find_unused_parameters": True}


class Heads(torch.nn.Module):
    """Each pass uses one of two heads, on all ranks; or, with `own`, another one on the first rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Linear(100, 200)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(200, 40) for _ in range(2))

    def forward(self, x, head, own=False):
        return self.heads[(head + (own and dist.get_rank() == 0)) % 2](torch.relu(self.body(x)))


def _mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def _difference(memory, ddp=(), spec=EACH, set_to_none=True, passes=1, factor_of_velocity=0.0, optimizer=None, **options):
    """The largest element of what gradients have been applied, and what waits, and of what the ranks' gradients were."""
    net, plain = Heads(), Heads()
    optimizer = optimizer and optimizer(net.parameters(), lr=0.0)
    model, state = wrap(net, spec, {**UNUSED, **dict(ddp)}, memory=memory, optimizer=optimizer, **options)
    given, applied = ([torch.zeros_like(p) for p in net.parameters()] for _ in range(2))
    for number, (x, _) in enumerate(batches(12)):
        head, own = number // (2 if passes == 1 else 1), number == 7
        if number % passes == 0:
            model.zero_grad(set_to_none)
        model(x, head, own).square().mean().backward()
        plain.zero_grad()
        plain(x, head, own).square().mean().backward()
        for total, p in zip(given, plain.parameters(), strict=True):
            total += torch.zeros_like(p) if p.grad is None else p.grad
        if number % passes == passes - 1:
            for total, p in zip(applied, net.parameters(), strict=True):
                if p.grad is not None:
                    total += p.grad
                    same_on_all_ranks(p.grad)
            if optimizer:
                optimizer.step()
    states, found = state._buckets.exchange.state_dict(), 0.0
    names = [name for name, _ in net.named_parameters()]
    for name, total, received in zip(names, given, applied, strict=True):
        waiting = torch.from_numpy(states["residual"][name]) if name in states["residual"] else torch.zeros(total.numel())
        if factor_of_velocity and name in states["velocity"]:
            waiting = waiting + factor_of_velocity * torch.from_numpy(states["velocity"][name])
        found = max(found, (_mean(total.flatten() - waiting) - received.flatten()).abs().max().item())
    return found


@check_under_every_launcher
def nothing_is_lost_that_is_sent_of_unused_parameters():
    for communicator, spec in (("allgather", EACH), ("sharded", "topk:0.05/rice/raw"), ("tree", "topk:0.05/rice/raw")):
        for view in (False, True):
            found = _difference("residual", {"gradient_as_bucket_view": view}, spec, communicator=communicator)
            assert found < 1e-6, (communicator, view, found)
    assert _difference("residual", spec="dense/onebit") < 1e-5
    for view in (False, True):  # where there is a gradient of an earlier pass, of zeros or not
        ddp = {"gradient_as_bucket_view": view}
        assert _difference("residual", ddp, set_to_none=False) < 1e-6, view
        assert _difference("residual", ddp, passes=2) < 1e-6, view
        assert _difference("residual", ddp, passes=3, set_to_none=False) < 1e-6, view
    assert _difference("residual", spec="topk:0.02/rice/qsgd:7") < 1e-5
    assert _difference("momentum:0.9", factor_of_velocity=9.0) < 1e-6
    assert _difference("adam", optimizer=torch.optim.AdamW) < 1e-6


@check
def memories_make_the_steps_of_unused_parameters():
    """In which there is something of them; all others stay without a gradient and without a step, as in plain DDP."""
    for kind, memory in ((torch.optim.AdamW, "adam"), (torch.optim.AdamW, "momentum:0.9"), ("muon", None)):
        net = Heads()
        matrices, others = ([p for p in net.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
        if kind == "muon":
            optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
        else:
            optimizers = [kind(net.parameters(), lr=1e-3)]
        model, _ = wrap(net, EACH, UNUSED, memory=memory, optimizer=optimizers)
        for number, (x, _) in enumerate(batches(6)):
            model.zero_grad()
            model(x, number % 2).square().mean().backward()
            unused = net.heads[1 - number % 2].weight
            before = unused.detach().clone()
            assert (unused.grad is None) == (number == 0), (memory, number)
            for optimizer in optimizers:
                optimizer.step()
            assert torch.equal(before, unused) == (number == 0), (memory, number)
            same_on_all_ranks(flat(net))


@check
def a_gradient_that_is_not_finite_changes_no_unused_parameter():
    net = Heads()
    model, state = wrap(net, EACH, UNUSED, memory="residual")
    for number, (x, _) in enumerate(batches(4)):
        model.zero_grad()
        (model(x, number % 2).square().mean() * (float("inf") if number == 3 else 1.0)).backward()
        assert (net.heads[1 - number % 2].weight.grad is None) == (number in (0, 3)), number


def _start(memory, spec=EACH, kind=torch.optim.SGD, rate=0.01, **options):
    net = module()
    optimizer = kind(net.parameters(), lr=rate)
    model, _ = wrap(net, spec, memory=memory, optimizer=optimizer, **options)
    return net, model, optimizer


ALL = {"rules": {"*": "dense/onebit"}}
NO_GRADIENTS = [
    ("dgc", EACH, torch.optim.SGD, {}),
    ("signum", "dense/sign:one", torch.optim.SGD, {}),
    ("demo", "dct:64/topk:0.05:per=chunk/auto/lloyd:0.05", torch.optim.SGD, {}),
    ("momentum:0.9", EACH, torch.optim.AdamW, {}),
    ("adam", EACH, torch.optim.AdamW, {}),
    ("onebit_adam:2", "dense/onebit", torch.optim.AdamW, ALL),
    ("zeroone_adam", "dense/onebit", torch.optim.AdamW, ALL),
]


@check
def a_result_that_is_no_gradient_is_not_exchanged_once_more():
    for memory, spec, kind, options in NO_GRADIENTS:
        for view in (False, True):
            _, model, optimizer = _start(memory, spec, kind, ddp={"gradient_as_bucket_view": view}, **options)
            for number, (x, y) in enumerate(batches(4)):
                with raises(ConfigError, "accumulate gradients in no_sync()") if number == 3 else contextlib.nullcontext():
                    loss_of(model, x, y).backward()
                if number < 2:
                    optimizer.step()
                    optimizer.zero_grad()


@check
def a_result_is_held_until_the_step_of_its_own_optimizer():
    net = module()
    matrices, others = ([p for p in net.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    muon, adam = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)
    model, _ = wrap(net, EACH, memory={"*.weight": "muon"}, optimizer=[muon, adam])
    for number, (x, y) in enumerate(batches(4)):
        with raises(ConfigError, "and 2 other parameters still hold") if number == 3 else contextlib.nullcontext():
            loss_of(model, x, y).backward()
        for optimizer in (muon, adam) if number < 2 else (adam,):
            optimizer.step()
            optimizer.zero_grad()


@check
def parameters_that_no_optimizer_has_hold_theirs_for_ever():
    for memory in ("dgc", "momentum:0.9"):
        net = module()
        optimizer = torch.optim.SGD([*net.parameters()][-2:], lr=0.01)
        model, _ = wrap(net, EACH, memory=memory)
        for x, y in batches(4):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        same_on_all_ranks(flat(net))
        loss_of(model, x, y).backward()
        with raises(ConfigError, "accumulate gradients in no_sync()"):
            loss_of(model, x, y).backward()


@check
def a_step_or_zero_grad_takes_a_result():
    """Of no_sync(), clipping, GradScaler's steps that are left out, and results that are dropped."""
    for memory, spec, kind, options in NO_GRADIENTS:
        for set_to_none in (True, False):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            net, model, optimizer = _start(memory, spec, kind, grad_scaler=scaler, **options)
            for number, (x, y) in enumerate(batches(8)):
                with model.no_sync():
                    scaler.scale(loss_of(model, x, y)).backward()
                scaler.scale(loss_of(model, x, y) * (float("inf") if number == 4 else 1.0)).backward()
                scaler.unscale_(optimizer)
                if "onebit" not in spec:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                if number == 6 and "onebit" not in spec:  # in another order, without a step
                    loss = loss_of(model, x, y)
                    optimizer.zero_grad(set_to_none)
                    loss.backward()
                model.zero_grad(set_to_none)
            assert torch.isfinite(flat(net)).all()
            same_on_all_ranks(flat(net))


@check
def gradients_are_exchanged_once_more_without_no_sync():
    for memory in ("residual", "none", "ef21"):
        net, model, optimizer = _start(memory)
        for number, (x, y) in enumerate(batches(6)):
            loss_of(model, x, y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        same_on_all_ranks(flat(net))
    ours, plain = (_start("residual", "dense/raw"), _start(None, None))
    for x, y in batches(4):
        for _, model, _ in (ours, plain):
            loss_of(model, x, y).backward()
    for p, q in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        close(p.grad, q.grad)

"""What is checked inside the ranks of one job: corners of training loops, against plain Horovod where it can do them."""

import functools
import warnings
from unittest import mock

import horovod.torch as hvd
import numpy as np
import torch
from harness import batches, compressed, flat, horovod, model, same_on_all_ranks, train
from support.checking import check, check_under_every_launcher, raises, shutdown_is_seen
from support.exchanges import arrays_of
from support.recomputing import Recomputing
from support.tensor_messages import check_tensor_messages

from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters.horovod_torch import DistributedOptimizer, HorovodTransport

LOSSLESS = "topk:0.05/rice/raw"


def loss_of(net, x, y):
    return torch.nn.functional.cross_entropy(net(x), y)


def small(seed=2):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(28 * 28, 48),
        torch.nn.ReLU(),
        torch.nn.Linear(48, 40),
        torch.nn.ReLU(),
        torch.nn.Linear(40, 10),
    )


def close(ours, theirs, atol=1e-6):
    assert torch.allclose(ours, theirs, rtol=0, atol=atol), (ours - theirs).abs().max()


@check
def recomputed_activations():
    for spec in ("dense/raw", LOSSLESS):
        close(train(compressed(spec), net=Recomputing(small(), 3))[0], train(compressed(spec), net=small())[0], atol=0)


class ByHand:
    """A plain optimizer whose gradients are averaged by Horovod's own operation, for what its optimizer cannot do."""

    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer
        self.zero_grad = optimizer.zero_grad

    def step(self):
        for name, p in self.net.named_parameters():
            if p.requires_grad:
                own = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = hvd.allreduce(own, op=hvd.Average, name=f"hand.{name}")
        self.optimizer.step()


@check
def a_shutdown_is_seen_by_the_watchdog():
    net = small()
    DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
    assert shutdown_is_seen(hvd)


# Mixed precision


def train_scaled(wrap, scaler, steps, loop, kind=torch.optim.SGD, overflow_at=None, dtype=torch.bfloat16, **options):
    """Returns the flat parameters after each step, and the optimizer. loop: "horovod" (as in its documentation), "clip" (the
    same with clipping) or "simple" (as in PyTorch's)."""
    net = small()
    optimizer = wrap(kind(net.parameters(), lr=0.05, **options), net.named_parameters())
    trace = []
    for step, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_of(net, x, y)
        if step == overflow_at and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if loop == "simple":
            scaler.step(optimizer)
        else:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            if loop == "clip":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        scaler.update()
        trace.append(flat(net))
    return trace, optimizer


def gradient_scaler(scale=2.0**10, interval=1000):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def scaled_with(scaler, spec=LOSSLESS, **options):
    return compressed(spec, grad_scaler=scaler, **options)


def memory_of(optimizer):
    """The bytes of all that is kept."""
    return {name: kept.tobytes() for name, kept in arrays_of(optimizer._grace.exchange).items()}


@check_under_every_launcher
def payloads_of_any_length_arrive_as_they_were_sent():
    rank, size = hvd.rank(), hvd.size()
    transport = HorovodTransport(hvd.global_process_set)
    for step, length in enumerate((1000, 1010, 990, 1005, 0, 7, 5000, 5001, 0, 0, 4990)):

        def payload(sender, receiver=0, step=step, length=length):
            size = 0 if (sender + receiver + step) % 5 == 0 else length + sender
            return np.random.default_rng([step, sender, receiver]).integers(0, 256, size, np.uint8)

        gathered = transport.allgather("of any length", payload(rank))
        parts = [payload(rank, receiver) for receiver in range(size)]
        swapped = transport.alltoall("to all", np.concatenate(parts), [part.size for part in parts])
        assert gathered.wait().tobytes() == np.concatenate([payload(sender) for sender in range(size)]).tobytes()
        assert swapped.wait().tobytes() == np.concatenate([payload(sender, rank) for sender in range(size)]).tobytes()
        assert 16 <= gathered.padding <= 16 + length // 16 and swapped.padding == 0


@check
def messages_go_to_the_transports_device_and_come_back_from_it():
    """There is no GPU here, so the device is the CPU, and what a GPU would copy is counted."""
    moves, to, cpu = [], torch.Tensor.to, torch.Tensor.cpu
    transport = HorovodTransport(hvd.global_process_set, torch.device("cpu"))
    own = np.arange(8, dtype=np.uint8)
    with (
        mock.patch.object(torch.Tensor, "to", lambda tensor, *given: moves.append(given) or to(tensor, *given)),
        mock.patch.object(torch.Tensor, "cpu", lambda tensor: moves.append("back") or cpu(tensor)),
    ):
        for collective in (
            lambda: transport.allgather("there and back", own),
            lambda: transport.allreduce("summed there", own.astype(np.float32)),
            lambda: transport.alltoall("to each there", own, [8, *[0] * (hvd.size() - 1)]),
        ):
            moves.clear()
            collective().wait()
            assert moves == [(torch.device("cpu"),), "back"], moves


@check
def tensors_go_as_arrays_do_and_stay_where_they_are():
    check_tensor_messages(HorovodTransport(hvd.global_process_set))


@check
def a_backend_that_is_not_there_is_refused():
    def made(backend):
        net = small()
        DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters(), backend=backend)

    with raises(ConfigError, "backend='mpi'; allowed: None, 'horovod' for Horovod's MPI or Gloo, 'gloo' for PyTorch's Gloo"):
        made("mpi")
    with raises(ConfigError, "Horovod was built without NCCL (see horovodrun --check-build)"):
        made("nccl")
    with mock.patch.object(hvd, "nccl_built", lambda: 1), raises(ConfigError, "this rank has no GPU"):
        made("nccl")


@check
def mixed_precision_is_what_horovod_gives():
    for loop, dtype in (("horovod", torch.bfloat16), ("clip", torch.float16)):
        scaler = gradient_scaler(interval=2)
        ours, _ = train_scaled(scaled_with(scaler, "dense/raw"), scaler, 4, loop, dtype=dtype)
        theirs, _ = train_scaled(horovod(), gradient_scaler(interval=2), 4, loop, dtype=dtype)
        close(ours[-1], theirs[-1])
        if loop == "horovod":
            scaler = gradient_scaler(interval=2)
            simple, _ = train_scaled(scaled_with(scaler, "dense/raw"), scaler, 4, "simple")
            close(simple[-1], theirs[-1])


@check
def a_changing_loss_scale_changes_nothing():
    """Powers of two scale without rounding, so all is the same to the bit, except for the order in which Gloo's allreduce
    adds up."""
    for spec in (LOSSLESS, "topk:0.05/rice/qsgd:7", "powersgd:2"):
        same = functools.partial(torch.allclose, rtol=1e-4, atol=1e-6) if spec == "powersgd:2" else torch.equal
        traces = []
        for loop, interval in (("horovod", 1000), ("horovod", 1), ("simple", 2)):
            scaler = gradient_scaler(interval=interval)
            trace, optimizer = train_scaled(scaled_with(scaler, spec), scaler, 6, loop)
            traces.append(trace[-1])
        assert scaler.get_scale() == 2.0**13, scaler.get_scale()
        same_on_all_ranks(traces[0])
        assert same(traces[0], traces[1]) and same(traces[0], traces[2]), spec
        unscaled, plain = train_scaled(compressed(spec), torch.amp.GradScaler("cpu", enabled=False), 6, "simple")
        assert same(traces[0], unscaled[-1]), spec
        assert spec == "powersgd:2" or memory_of(optimizer) == memory_of(plain), "the memory is not in unscaled units"


@check
def an_overflow_on_one_rank_is_skipped_on_all():
    for loop, kind, options in (
        ("horovod", torch.optim.SGD, {"momentum": 0.9}),
        ("simple", torch.optim.SGD, {}),
        ("simple", torch.optim.Adam, {"fused": True}),
        ("clip", torch.optim.Adam, {}),
    ):
        scaler, memories = gradient_scaler(), []

        def wrap(optimizer, named, scaler=scaler, memories=memories):
            ours = scaled_with(scaler)(optimizer, named)
            end_step = ours._grace.exchange.end_step
            ours._grace.exchange.end_step = lambda: (end_step(), memories.append(memory_of(ours)))[0]
            return ours

        trace, optimizer = train_scaled(wrap, scaler, 5, loop, kind, overflow_at=2, **options)
        assert torch.equal(trace[1], trace[2]), f"{loop}: the step was not skipped"
        assert not torch.equal(trace[2], trace[3]) and torch.isfinite(trace[4]).all()
        assert memories[1] == memories[2] != memories[3] and len(memories) == 5, "a memory changed"
        same_on_all_ranks(trace[4])
        assert scaler.get_scale() == 2.0**9  # backed off on every rank
        assert optimizer.compression_stats()["steps"] == 5


@check
def a_scaler_in_the_wrong_order_or_unknown_is_told():
    scaler = gradient_scaler()
    net = small()
    optimizer = scaled_with(scaler)(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    x, y = next(batches(1))
    scaler.scale(loss_of(net, x, y)).backward()
    scaler.unscale_(optimizer)
    with raises(ExchangeError, "optimizer.synchronize() before it"):
        scaler.step(optimizer)
    optimizer.synchronize()
    for spec, expected in ((LOSSLESS, 1), ("dense/raw", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_scaled(compressed(spec), gradient_scaler(), 1, "simple")
        assert len([w for w in caught if "grad_scaler=scaler" in str(w.message)]) == expected, caught
    with raises(ConfigError, "allowed: a torch.amp.GradScaler"):
        compressed(grad_scaler=2.0)(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())


# Parameters


@check
def parameters_are_frozen_and_unfrozen():
    def run(wrap):
        net = small()
        net[3].requires_grad_(False)
        optimizer = wrap(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        trace = []
        for step, (x, y) in enumerate(batches(9)):
            net[3].requires_grad_(step >= 3)
            net[1].requires_grad_(step < 6)
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
            trace.append([p.detach().double().clone() for p in (net[1].weight, net[3].weight)])
            same_on_all_ranks(flat(net))
        return flat(net), trace, optimizer

    theirs, _, _ = run(ByHand)
    for spec in ("dense/raw", "topk:0.05/rice/qsgd:7", "powersgd:2"):
        ours, trace, optimizer = run(lambda net, plain, s=spec: compressed(s)(plain, net.named_parameters()))
        assert torch.equal(trace[0][1], trace[2][1]) and not torch.equal(trace[2][1], trace[3][1])
        assert not torch.equal(trace[4][0], trace[5][0]) and torch.equal(trace[5][0], trace[8][0])
        compressed_now = {t.name for b in optimizer._grace.exchange.buckets for t in b.tensors}
        assert "3.weight" in compressed_now and "1.weight" not in compressed_now, compressed_now
        if spec == "dense/raw":
            close(ours, theirs)


@check
def parameters_are_added_to_the_optimizer():
    net = small()
    hand = ByHand(net, torch.optim.SGD(net[1].parameters(), lr=0.1))
    results = []
    for spec in (None, "dense/raw", LOSSLESS):
        net = small()
        plain = torch.optim.SGD(net[1].parameters(), lr=0.1)
        optimizer = ByHand(net, plain) if spec is None else compressed(spec)(plain, net.named_parameters())
        hand = plain if spec is None else optimizer
        for step, (x, y) in enumerate(batches(4)):
            if step == 2:
                hand.add_param_group({"params": net[5].parameters(), "lr": 0.2})
            optimizer.zero_grad()
            net[5].zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
        results.append(flat(net))
    close(results[0], results[1])
    same_on_all_ranks(results[2])
    with raises(ConfigError, "named_parameters lacks 1"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.zeros(3))})
    assert len(optimizer.param_groups) == 2


@check
def a_parameter_with_several_names_is_exchanged_once():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second = torch.nn.Linear(50, 50), torch.nn.Linear(50, 50)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    results, sent = [], []
    for once in (True, False):
        net = Tied()
        optimizer = compressed("topk:0.1/rice/raw")(
            torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters(remove_duplicate=once)
        )
        names = list(optimizer._grace.parameters)
        assert names == ["first.weight", "first.bias", "second.bias"], names
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(8, 50, generator=generator)).square().mean().backward()
            optimizer.step()
        results.append(flat(net))
        sent.append(optimizer.compression_stats()["bytes_out"])
    assert torch.equal(*results) and sent[0] == sent[1], sent
    same_on_all_ranks(results[0])


@check
def several_optimizers_and_groups_over_one_model():
    def run(wrap):
        net = model()
        body = [
            {"params": net[0].parameters(), "lr": 0.05},
            {"params": net[1].parameters(), "lr": 0.02, "momentum": 0.5},
            {"params": [net[5].weight], "weight_decay": 0.1},
        ]
        optimizers = [
            wrap(torch.optim.SGD(body, lr=0.1), net.named_parameters()),
            wrap(torch.optim.Adam([net[5].bias, *net[7].parameters()], lr=0.01), net.named_parameters()),
        ]
        for x, y in batches(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(net, x, y).backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
        return flat(net)

    close(run(compressed("dense/raw")), run(horovod()), 1e-5)
    same_on_all_ranks(run(compressed()))


class Tied(torch.nn.Module):
    """One weight in two modules, used twice; and parameters that no rank ever uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.unused = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.second(torch.relu(self.first(x.flatten(1)[:, :64])))


@check
def shared_and_unused_parameters():
    def run(wrap):
        return train(wrap, steps=4, net=Tied())[0]

    close(run(compressed("dense/raw")), run(horovod()))
    same_on_all_ranks(run(compressed()))
    same_on_all_ranks(run(compressed("powersgd:2")))


@check
def fewer_passes_than_declared_and_other_zero_grads():
    def run(wrap, to_none=None):
        net = small()
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        for passes in (2, 1, 2, 3):
            optimizer.zero_grad(*(() if to_none is None else (to_none,)))
            optimizer.set_backward_passes_per_step(max(passes, 2))
            for x, y in batches(passes):
                loss_of(net, x, y).backward()
            optimizer.step()
        return flat(net)

    close(run(compressed("dense/raw", backward_passes_per_step=2)), run(horovod(backward_passes_per_step=2)))
    kept, none = (run(compressed(backward_passes_per_step=2), to_none) for to_none in (False, True))
    assert torch.equal(kept, none)
    same_on_all_ranks(kept)


@check
def half_and_double_parameters_and_channels_last():
    for dtype, atol in ((torch.float64, 1e-7), (torch.float16, 2e-3), (torch.bfloat16, None)):
        nets = [model().to(dtype=dtype, memory_format=torch.channels_last) for _ in range(3)]
        wraps = [compressed(), compressed("dense/raw"), horovod()][: 2 + (atol is not None)]  # Horovod fails with bfloat16
        results = []
        for net, wrap in zip(nets, wraps, strict=False):
            optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
            for x, y in batches(3):
                optimizer.zero_grad()
                loss_of(net, x.to(dtype, memory_format=torch.channels_last), y).backward()
                optimizer.step()
            assert all(p.grad.dtype == dtype for p in net.parameters())
            results.append(flat(net))
        same_on_all_ranks(results[0])
        same_on_all_ranks(results[1])
        if atol is not None:
            close(results[1], results[2], atol)


@check
def gradients_that_are_not_contiguous():
    def run(wrap, weight):
        p = torch.nn.Parameter(weight)
        optimizer = wrap(torch.optim.SGD([p], lr=1.0), [("p", p)])
        for x, y in batches(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(x.flatten(1) @ p, y).backward()
            strides = p.grad.stride()
            optimizer.step()
        return p.detach().double().contiguous(), strides

    start = torch.linspace(-1, 1, 7840).reshape(784, 10)
    for spec in ("dense/raw", LOSSLESS):
        plain, _ = run(compressed(spec), start.clone())
        turned, strides = run(compressed(spec), start.T.contiguous().T)
        assert strides == (1, 784), strides
        close(turned, plain, 1e-5)
        same_on_all_ranks(turned)
    close(run(compressed("dense/raw"), start.clone())[0], run(horovod(), start.clone())[0])


@check
def momentum_is_applied_once():
    net = small()
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})):
        with raises(ConfigError, "would be applied once more"):
            compressed(memory="dgc")(kind(net.parameters(), lr=0.1, **options), net.named_parameters())
    apart = [{"params": net[1].parameters(), "momentum": 0.9}, {"params": [*net[3].parameters(), *net[5].parameters()]}]
    compressed(memory={"1.*": "residual", "*": "dgc"})(torch.optim.SGD(apart, lr=0.1), net.named_parameters())
    # Of tensors that are sent exactly, the mean of the ranks' momenta is the momentum of the mean.
    ours, _, _ = train(
        lambda plain, named: compressed("dense/raw", memory="dgc:momentum=0.9")(
            torch.optim.SGD(plain.param_groups[0]["params"], lr=0.05), named
        ),
        net=small(),
    )
    theirs, _, _ = train(horovod(), net=small())
    close(ours, theirs, 1e-5)


# Wrapping


@check
def wrapping_once_more_detaches_the_first():
    net = small()
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    first = compressed()(plain, net.named_parameters())
    x, y = next(batches(1))
    loss_of(net, x, y).backward()
    first.step()
    first.zero_grad()
    second = compressed("dense/raw")(plain, net.named_parameters())
    third = compressed("dense/raw")(second, net.named_parameters())
    reference = small()
    reference.load_state_dict(net.state_dict())
    theirs, _, _ = train(
        lambda *_: horovod()(torch.optim.SGD(reference.parameters(), lr=0.1), reference.named_parameters()), net=reference
    )
    for x, y in batches(5):
        third.zero_grad()
        loss_of(net, x, y).backward()
        third.step()
    close(flat(net), theirs)
    assert [o.compression_stats()["steps"] for o in (first, second, third)] == [1, 0, 5]
    for old in (first, second):
        with raises(ExchangeError, "wrapped once more"):
            old.step()
    with raises(ConfigError, "wrap the plain one"):
        DistributedOptimizer(horovod()(plain, net.named_parameters()), net.named_parameters())


@check
def a_scheduler_made_before_wrapping_warns_when_it_should():
    for right in (True, False):
        net = small()
        plain = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
        optimizer = compressed()(compressed()(plain, net.named_parameters()), net.named_parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, y in batches(2):
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
                for step in (optimizer.step, scheduler.step)[:: 1 if right else -1]:
                    step()
        assert any("lr_scheduler.step()" in str(w.message) for w in caught) != right, caught
        assert np.isclose(optimizer.param_groups[0]["lr"], 0.001)

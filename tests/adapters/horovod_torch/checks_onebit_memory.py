"""What is checked inside the ranks of one job: the memories of 1-bit Adam and 0/1 Adam."""

import copy
import io
from contextlib import nullcontext

import horovod.torch as hvd
import numpy as np
import torch
from harness import batches, flat, horovod, same_on_all_ranks
from support.checking import check, check_under_every_launcher, raises
from support.exchanges import arrays_of
from support.reference_kernels.compressed_adam import CompressedAdam

import grace_ext
from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters.horovod_torch import DistributedOptimizer

ALL = {"rules": {"*": "dense/onebit"}}  # biases as well


def linear(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))


def wrapped(net, memory, kind=torch.optim.Adam, given=(), **options):
    return DistributedOptimizer(
        kind(net.parameters(), **{"lr": 1e-3, **dict(given)}), net.named_parameters(), memory=memory, **{**ALL, **options}
    )


def run(optimizer, net, data, steps, clip=0.0):
    for _ in range(steps):
        x, y = next(data)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        if clip:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return flat(net)


@check
def exact_steps_are_those_of_torchs_adam():
    for kind, options, clip in (
        (torch.optim.Adam, {"weight_decay": 0.1}, 0.1),
        (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}, 0.0),
        (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.99)}, 0.1),
    ):
        betas = "beta1={}:beta2={}".format(*options.get("betas", (0.9, 0.999)))
        for memory in (f"onebit_adam:5:{betas}", f"zeroone_adam:4:{betas}"):
            net, other = linear(), linear()
            optimizer = wrapped(net, memory, kind, {**options, "eps": 1e-5})
            theirs = horovod()(kind(other.parameters(), lr=1e-3, eps=1e-5, **options), other.named_parameters())
            ours, expected = (run(one, n, batches(5), 5, clip) for one, n in ((optimizer, net), (theirs, other)))
            assert torch.allclose(ours, expected, rtol=0, atol=1e-6), (memory, (ours - expected).abs().max())
            same_on_all_ranks(ours)
            assert optimizer.compression_stats()["compressed"]["ratio"] == 1


@check_under_every_launcher
def steps_are_those_of_the_algorithm():
    compressor, rate, decay, eps = grace_ext.compressor("dense/onebit"), 1e-2, 0.05, 1e-8
    for memory, exact in (("onebit_adam:3", (0, 1, 2)), ("zeroone_adam:1", (0, 1, 3, 7))):
        torch.manual_seed(1)
        net = torch.nn.Linear(60, 40, bias=False)
        optimizer = wrapped(net, memory, given={"lr": rate, "weight_decay": decay, "eps": eps})
        reference = CompressedAdam(
            net.weight.numel(),
            hvd.size(),
            exact,
            lambda row: grace_ext.decompress(compressor.compress(row.astype(np.float32)), size=row.size),
            floor=0.1,
        )
        generator = torch.Generator().manual_seed(hvd.rank())
        for step in range(10):
            x = torch.randn(16, 60, generator=generator)
            optimizer.zero_grad()
            (net(x) - x[:, :40].sin()).square().mean().backward()
            own = hvd.allgather(net.weight.grad.flatten()[None].clone(), name="own").numpy()
            p = net.weight.detach().numpy().ravel().astype(np.float64)
            optimizer.step()
            first, root = reference.step(own, penalty=decay * p)
            expected = p - rate * first / (root + eps)
            difference = np.abs(net.weight.detach().numpy().ravel() - expected).max()
            assert difference < 1e-5, (memory, step, difference)
            ratio = optimizer.compression_stats()["last_step"]["compressed"]["ratio"]
            assert ratio == 1 if step in exact else 24 < ratio < 32, (memory, step, ratio)
        same_on_all_ranks(flat(net))
        residual = optimizer._grace.exchange.state_dict()["residual"]["weight"]
        expected = reference.residuals[hvd.rank()]
        assert np.allclose(residual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@check
def a_training_goes_on_from_a_checkpoint_bit_by_bit():
    for memory, communicator in (("onebit_adam:3", "sharded"), ("zeroone_adam:1", "allgather")):
        for stop in (2, 5):
            net = linear()
            optimizer = wrapped(net, memory, torch.optim.AdamW, communicator=communicator)
            data = batches(9)
            run(optimizer, net, data, stop)
            file = io.BytesIO()
            torch.save((net.state_dict(), optimizer.state_dict()), file)
            rest = list(data)
            expected = run(optimizer, net, iter(rest), 9 - stop)
            file.seek(0)
            weights, saved = torch.load(file, weights_only=True)
            again = linear(seed=5)
            other = wrapped(again, memory, torch.optim.AdamW, communicator=communicator)
            again.load_state_dict(weights)
            other.load_state_dict(saved)
            assert torch.equal(run(other, again, iter(rest), 9 - stop), expected), (memory, stop)
            mine, theirs = arrays_of(optimizer._grace.exchange), arrays_of(other._grace.exchange)
            assert mine.keys() == theirs.keys() and all(np.array_equal(mine[key], theirs[key]) for key in mine)
            same_on_all_ranks(expected)
            same_on_all_ranks(torch.from_numpy(mine["moments:1.weight"]))


@check
def a_step_with_a_nan_on_one_rank_leaves_the_moments():
    for steps in (1, 4):
        net, data = linear(), batches(8)
        optimizer = wrapped(net, "onebit_adam:2")
        run(optimizer, net, data, steps)
        before = copy.deepcopy(arrays_of(optimizer._grace.exchange))
        x, y = next(data)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x * (torch.nan if hvd.rank() == 1 else 1)), y).backward()
        optimizer.synchronize()
        assert not torch.isfinite(net[1].weight.grad).any()
        with optimizer.skip_synchronize():
            optimizer.step()  # as with Adam itself, whoever makes this step has parameters that are no numbers
        after = arrays_of(optimizer._grace.exchange)
        assert all(np.array_equal(before[key], after[key]) for key in before), steps


@check
def a_grad_scaler_changes_nothing_but_skips_on_all_ranks():
    """Its scale is a power of two. A rank's infinite gradient makes all ranks leave out the step, before and after the warm-up."""
    results = []
    for scale in (1.0, 2.0**12):
        net = linear()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        optimizer = wrapped(net, "onebit_adam:3", grad_scaler=scaler)
        for step, (x, y) in enumerate(batches(9)):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            if step in (1, 6) and hvd.rank() == 1:
                loss = loss + (net[1].weight * 0).sum() * float("inf")
            before = flat(net), arrays_of(optimizer._grace.exchange)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            after = arrays_of(optimizer._grace.exchange)
            if step in (1, 6):
                assert torch.equal(flat(net), before[0])
                assert all(np.array_equal(array, after[key]) for key, array in before[1].items()), step
            else:
                assert not torch.equal(flat(net), before[0]), step
        assert after["moments:1.weight"][:2].tolist() == [7, 3]
        same_on_all_ranks(flat(net))
        results.append(flat(net))
    assert torch.equal(*results)


@check
def layouts_and_dtypes_of_parameters_are_followed():
    """channels_last, for which the averages go to torch's Adam by hand; and bfloat16."""
    torch.manual_seed(1)
    start = torch.nn.Conv2d(3, 64, 3).to(memory_format=torch.channels_last)

    def trained(optimizer, net, steps, average=lambda: None):
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(steps):
            x = torch.randn(4, 3, 8, 8, generator=generator).to(net.weight.dtype, memory_format=torch.channels_last)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            average()
            optimizer.step()
        return flat(net)

    net, half, other = (copy.deepcopy(start).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32))

    def average():
        for name, p in other.named_parameters():
            p.grad.copy_(hvd.allreduce(p.grad.contiguous(), name=name))

    given = {"eps": 1e-5}
    expected = trained(torch.optim.Adam(other.parameters(), lr=1e-3, eps=1e-5), other, 3, average)
    ours = trained(wrapped(net, "onebit_adam:3", given=given), net, 3)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-6)
    optimizer = wrapped(half, "onebit_adam:3", given=given)
    # Weights of up to 0.2 are a multiple of 2**-10.
    assert torch.allclose(trained(optimizer, half, 3), expected, rtol=0, atol=3e-3)
    after = trained(optimizer, half, 3)
    same_on_all_ranks(after)
    assert torch.isfinite(after).all() and not torch.equal(after, expected)


@check
def tensors_that_were_frozen_begin_anew():
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 20), torch.nn.Linear(20, 10))
    optimizer, data = wrapped(net, "onebit_adam:2"), batches(12)
    for frozen, steps in ((False, 3), (True, 3), (False, 6)):
        net[2].weight.requires_grad_(not frozen)
        optimizer.zero_grad()
        run(optimizer, net, data, steps)
        same_on_all_ranks(flat(net))
    moments = optimizer._grace.exchange.state_dict()["moments"]
    # The step that finds it frozen is one of the first four, and the one that finds it back sums it by itself.
    assert moments["1.weight"][:2].tolist() == [12, 2], moments["1.weight"][:2]
    assert moments["2.weight"][:2].tolist() == [5, 2], moments["2.weight"][:2]


@check
def each_exchange_needs_a_step():
    net, data = linear(), batches(3)
    optimizer = wrapped(net, "onebit_adam:2")
    run(optimizer, net, data, 1)
    for number in range(2):
        x, y = next(data)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        with (
            raises(ExchangeError, "the optimizer made no step with what the last exchange gave") if number else nullcontext()
        ):
            optimizer.synchronize()


@check
def what_cannot_be_honoured_is_refused():
    for kind, given, memory, message in (
        (torch.optim.SGD, {}, "onebit_adam:5", "not SGD"),
        (torch.optim.NAdam, {}, "onebit_adam:5", "not NAdam"),
        (torch.optim.Adam, {"amsgrad": True}, "onebit_adam:5", "amsgrad"),
        (torch.optim.Adam, {"betas": (0.9, 0.99)}, "onebit_adam:5", "beta2=0.999, the optimizer 0.9 and 0.99: give both"),
        (torch.optim.Adam, {"betas": (0.8, 0.999)}, "zeroone_adam", "beta1=0.9 and beta2=0.999, the optimizer 0.8"),
    ):
        with raises(ConfigError, message):
            wrapped(linear(), memory, kind, given)
    with raises(ConfigError, "use residual, momentum, adam, muon or none"):
        wrapped(linear(), "onebit_adam:5", communicator="auto")
    with raises(ConfigError, "warmup_steps=None"):
        wrapped(linear(), "onebit_adam")
    net = linear()
    optimizer = wrapped(net, "onebit_adam:1")
    run(optimizer, net, batches(1), 1)
    with raises(ConfigError, "join() is not supported"):
        optimizer.join()

"""Low-rank factors of gradients on an accelerator: the host's within rounding, and the same on all ranks in every bit."""

import numpy as np
import torch
from accelerator import Accelerator
from inputs import STREAM, same, tensor, vector
from support.checking import check
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.lowrank_exchanges import SHAPES, TENSORS, make

from grace_ext.adapters._torch.factor_bucket import FactorBucket
from grace_ext.adapters._torch.kernels import lowrank
from grace_ext.kernels.lowrank import expand

SIZE = sum(one.size for one in TENSORS)


@check
def products_are_the_host_s_in_every_bit():
    for rank, rows, columns in ((1, 1, 1), (2, 7, 300), (4, 130, 9), (7, 40, 41)):
        for keep in (True, False):
            pt, qt, own = (
                vector("normal", rank * n, seed).reshape(rank, n) for seed, n in enumerate((rows, columns, columns))
            )
            residual = vector("huge", rows * columns, 3) if keep else np.empty(0, np.float32)
            own = own * np.float32(1e37) if keep else own  # some differences overflow
            ours, out, largest = tensor(residual), torch.empty(rows * columns), torch.zeros(1, dtype=torch.int32)
            lowrank.expand(tensor(pt), tensor(qt), tensor(own), 0.3, out, ours, largest)
            expected = np.empty(rows * columns, np.float32)
            found = expand(pt, qt, np.float32(0.3), expected, own, residual)
            assert same(out, expected) and same(ours, residual) and int(largest) == found, (rank, rows, columns, keep)


def train(spec, memory, on_device, ranks=2, empty=False):
    """Results, and what is kept; in the second step rank 1 has a NaN, in the third it has joined, if `empty`."""

    def work(transport):
        exchange, results = make(transport, spec, memory), []
        if on_device:
            bucket = exchange.buckets[0]
            assert FactorBucket.fits(bucket.compressor, bucket.communicator, bucket.memory)
            exchange.set_buckets([FactorBucket.made_of(bucket)])
        bucket = exchange.buckets[0]
        for step in range(4):
            given = vector("normal", SIZE, 10 * step + transport.rank)
            if step == 1 and transport.rank == 1:
                given[100] = np.nan
            out = torch.empty(SIZE) if on_device else np.empty(SIZE, np.float32)
            if step == 2 and transport.rank == 1 and empty:
                exchange.begin_step(gradients=False)
                exchange.start_empty(bucket)
            else:
                exchange.start(bucket, lambda into, given=given: _copy(given, into))
            if step % 2:
                exchange.advance()
            exchange.finish(bucket, out)
            assert exchange.end_step() == (step != 1)
            results.append(np.array(out))
        return results, arrays_of(exchange)

    return on_all_ranks(work, ranks)


def _copy(given, into):
    if isinstance(into, np.ndarray):
        np.copyto(into, given)
    else:
        into.copy_(torch.from_numpy(given))


@check
def steps_are_the_host_s_within_rounding_and_alike_on_all_ranks():
    for spec, memory, empty in (
        ("powersgd:2", "residual", False),
        ("powersgd:2", "residual", True),
        ("powersgd:3:min_rate=1:iterations=2", "none", False),
        ("powersgd:2:start=3:warm_start=false", "residual", False),
    ):
        expected, found = (train(spec, memory, on_device, empty=empty) for on_device in (False, True))
        for (outs, kept), (own, state) in zip(expected, found, strict=True):
            for a, b in zip(outs, own, strict=True):
                np.testing.assert_allclose(b, a, rtol=0, atol=1e-5)
            assert kept.keys() == state.keys()
            for key, array in kept.items():
                np.testing.assert_allclose(state[key], array, rtol=0, atol=1e-5)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found[0][0], found[1][0], strict=True)), spec


@check
def residuals_in_fewer_bits_are_the_host_s_within_theirs():
    expected, found = (train("powersgd:2", "residual:bits=8", on_device) for on_device in (False, True))
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found[0][0], found[1][0], strict=True))
    for (outs, kept), (own, state) in zip(expected, found, strict=True):
        assert kept.keys() == state.keys()
        for a, b in [*zip(outs, own, strict=True), *((kept[name], state[name]) for name in kept)]:
            np.testing.assert_allclose(b, a, rtol=0, atol=0.5)  # roundings that differ go on into the next step
        np.testing.assert_allclose(own[0], outs[0], rtol=0, atol=1e-5)


@check
def only_factors_and_whole_tensors_cross():
    def work(transport):
        exchange = make(transport, "powersgd:2", "residual")
        with Accelerator() as accelerator:
            bucket = FactorBucket.made_of(exchange.buckets[0])
            exchange.set_buckets([bucket])
            state = bucket.memory.begin(bucket.name, bucket.size, bucket._arrays)
            state[1].copy_(torch.from_numpy(vector("normal", SIZE)))
            pending = bucket.communicator.start(
                transport, bucket.name, bucket.compressor, state[1], state, STREAM, bucket.sizes
            )
            assert bucket.finish(pending, transport, torch.empty(SIZE, device="cpu"), 1.0)
        return accelerator.crossings.nbytes, accelerator.crossings.times, pending.wire_bytes

    nbytes, times, sent = on_all_ranks(work, 1)[0]
    assert sent <= nbytes <= sent + 64 and times == 3, (nbytes, times, sent)
    assert sent < 4 * SIZE / 2 and set(SHAPES) >= {"bias", "small"}

"""Communicators over the in-process transport, against a sum computed in one place."""

import numpy as np
import pytest
from support.in_process_ranks import RANKS, gradient, on_all_ranks

import grace_ext
from grace_ext import ConfigError, ExchangeError
from grace_ext._util.rng import Stream
from grace_ext.pipeline import spec
from grace_ext.transport import InProcessGroup


def exchange(communicator, compressor, gradients, weight=1.0):
    communicator, compressor = spec.parse_stage("communicator", communicator), grace_ext.compressor(compressor)

    def work(transport):
        mine = gradients[transport.rank].copy()
        pending = communicator.start(transport, "bucket", compressor, mine, None, Stream(rank=transport.rank))
        out = np.full(mine.size, 7, np.float32)
        finite = communicator.finish(pending, transport, out, weight)
        return out, finite, pending

    return on_all_ranks(work)


@pytest.mark.parametrize(
    "name", ["topk:0.1/rice/raw", "topk:0.1/rice/qsgd:7", "dense/deflate", "dense/raw", "topk:0.9/bitmap"]
)
def test_allgather_is_the_sum_in_rank_order(name):
    gradients = [gradient(rank) for rank in range(RANKS)]
    expected = np.zeros(5000, np.float32)
    for rank, one in enumerate(gradients):
        blob = grace_ext.compressor(name).compress(one, rank=rank)
        expected += np.float32(0.5) * grace_ext.decompress(blob, one.size)
    for out, finite, pending in exchange("allgather", name, gradients, 0.5):
        np.testing.assert_array_equal(out, expected)
        assert finite
        assert pending.wire_bytes > 0 and {"exchange", "decode"} <= pending.seconds.keys()


def test_allgather_of_sparse_and_dense_containers_mixed():
    gradients = [gradient(rank) for rank in range(RANKS)]
    communicator = spec.parse_stage("communicator", "allgather")

    def work(transport):
        compressor = grace_ext.compressor("dense/raw" if transport.rank == 1 else "topk:0.05/rice/raw")
        pending = communicator.start(transport, "b", compressor, gradients[transport.rank], None, Stream())
        out = np.empty(5000, np.float32)
        communicator.finish(pending, transport, out, 1.0)
        return out

    sparse = grace_ext.compressor("topk:0.05/rice/raw")
    parts = [g if rank == 1 else grace_ext.decompress(sparse.compress(g), g.size) for rank, g in enumerate(gradients)]
    for out in on_all_ranks(work):
        np.testing.assert_array_equal(out, parts[0] + parts[1] + parts[2])


@pytest.mark.parametrize("name, tolerance", [("dense/raw", 0), ("dense/fp16", 2e-2)])
def test_allreduce(name, tolerance):
    gradients = [gradient(rank) for rank in range(RANKS)]
    expected = (gradients[0] + gradients[1] + gradients[2]) * np.float32(1 / 3)
    results = exchange("allreduce", name, gradients, 1 / 3)
    for out, finite, _ in results:
        np.testing.assert_allclose(out, expected, atol=tolerance)
        np.testing.assert_array_equal(out, results[0][0])
        assert finite


@pytest.mark.parametrize(
    "name, tolerance", [("randomk:0.1", 0), ("randomk:0.1/rice/fp16", 2e-2), ("randomk:0.1:unbiased=true/raw", 1e-6)]
)
def test_allreduce_of_shared_positions_is_what_allgather_gives(name, tolerance):
    gradients = [gradient(rank) for rank in range(RANKS)]
    gathered, reduced = (exchange(communicator, name, gradients, 0.5) for communicator in ("allgather", "allreduce"))
    for (out, finite, pending), (expected, _, _) in zip(reduced, gathered, strict=True):
        np.testing.assert_allclose(out, expected, atol=tolerance)
        np.testing.assert_array_equal(out, reduced[0][0])
        assert finite and np.count_nonzero(out) == 500
        assert pending.wire_bytes == (2 if "fp16" in name else 4) * 500


@pytest.mark.parametrize("name", ["randomk:0.1", "randomk:0.1/fp16", "randomk:0.1:unbiased=true/fp16"])
def test_allreduce_of_shared_positions_keeps_what_was_not_sent(name):
    communicator, compressor = spec.parse_stage("communicator", "allreduce"), grace_ext.compressor(name)
    one = gradient(0)
    residual, room = np.full(one.size, 0.25, np.float32), one.copy()
    transport = InProcessGroup(1).transport(0)
    pending = communicator.start(transport, "b", compressor, room, (residual, room), Stream())
    out = np.empty(one.size, np.float32)
    assert communicator.finish(pending, transport, out, 1.0)
    np.testing.assert_array_equal(room, one + residual - out)
    assert np.count_nonzero(out) == 500


@pytest.mark.parametrize(
    "communicator, name",
    [
        ("allgather", "topk:0.1/rice/qsgd:7"),
        ("allgather", "dense/qsgd:4"),
        ("allreduce", "dense/fp16"),
        ("allreduce", "dense/raw"),
        ("allgather", "randomk:0.01"),
        ("allreduce", "randomk:0.01"),
        ("allreduce", "randomk:0.01/fp16"),
        ("allreduce", "randomk:0.01:unbiased=true"),
    ],
)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_non_finite_rank_is_seen_by_all(communicator, name, poison):
    gradients = [gradient(rank) for rank in range(RANKS)]
    gradients[1][123] = poison
    for out, finite, _ in exchange(communicator, name, gradients):
        assert not finite
        assert not np.isfinite(out[123])


def test_fp16_sum_of_large_values_does_not_overflow():
    for out, finite, _ in exchange("allreduce", "dense/fp16", [np.full(10, 60000, np.float32)] * RANKS):
        assert finite and (out > 64000).all()


def test_allreduce_keeps_the_error_of_half_precision():
    communicator, compressor = spec.parse_stage("communicator", "allreduce"), grace_ext.compressor("dense/fp16")
    one = gradient(0)
    residual, room = np.full(one.size, 0.25, np.float32), one.copy()
    transport = InProcessGroup(1).transport(0)
    pending = communicator.start(transport, "b", compressor, room, (residual, room), Stream())
    out = np.empty(one.size, np.float32)
    communicator.finish(pending, transport, out, 1.0)
    np.testing.assert_array_equal(out + room, one + residual)
    assert np.abs(room).max() > 0


def test_impossible_pairing_is_refused():
    with pytest.raises(ConfigError, match="allgather"):
        spec.parse_stage("communicator", "allreduce").check(grace_ext.compressor("topk:0.1"))
    spec.parse_stage("communicator", "allreduce").check(grace_ext.compressor("dense/fp16"))


def test_a_missing_rank_is_named():
    transport = InProcessGroup(2, timeout=0.05).transport(0)
    with pytest.raises(ExchangeError, match=r"ranks \[1\]"):
        transport.allgather("lonely", np.zeros(3, np.uint8)).wait()


def test_in_process_collectives_match_by_name_in_any_order():
    def work(transport):
        names = ["a", "b", "a"] if transport.rank else ["b", "a", "a"]
        handles = [(name, transport.allgather(name, np.full(transport.rank + 1, ord(name), np.uint8))) for name in names]
        return {name: handle.wait().tolist() for name, handle in handles}

    for result in on_all_ranks(work, 2):
        assert result == {"a": [97] * 3, "b": [98] * 3}

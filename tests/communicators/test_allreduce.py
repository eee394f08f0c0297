"""allreduce: sums of values that all ranks send at the same positions."""

import numpy as np
import pytest
from support.communication import exchange
from support.in_process_ranks import RANKS, gradient

import grace_ext
from grace_ext._util.rng import Stream
from grace_ext.pipeline import spec
from grace_ext.transport import InProcessGroup


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["dense/raw", "dense/fp16", "randomk:1.0"])
def test_an_inf_with_a_residual_raises_no_warning_on_the_rank_that_has_it(name):
    communicator, compressor = spec.parse_stage("communicator", "allreduce"), grace_ext.compressor(name)
    gradient, residual = np.ones(100, np.float32), np.full(100, 0.25, np.float32)
    gradient[7], gradient[8] = np.inf, np.finfo(np.float32).max
    residual[8] = gradient[8]
    transport = InProcessGroup(1).transport(0)
    pending = communicator.start(transport, "b", compressor, gradient, (residual, gradient), Stream())
    assert not communicator.finish(pending, transport, np.empty(100, np.float32), 1.0)

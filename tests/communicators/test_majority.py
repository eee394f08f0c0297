"""majority: a vote on signs."""

import numpy as np
import pytest
from support.arrays import gauss
from support.communication import exchange
from support.in_process_ranks import RANKS, on_all_ranks

import grace_ext
from grace_ext import ConfigError
from grace_ext._util.rng import Stream
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup

SPEC = "dense/sign:one"


def votes(gradients):
    return np.where(sum(np.where(one >= 0, 1, -1) for one in gradients) >= 0, 1, -1)


@pytest.mark.parametrize("size", [1, 2, 5000])
def test_the_majority_of_signs(size):
    gradients = [gauss(size, rank) for rank in range(RANKS)]
    for out, finite, pending in exchange("majority", SPEC, gradients, 1 / RANKS):
        assert finite and out.tolist() == votes(gradients).tolist()
        assert pending.wire_bytes < 2 * size / 8 + 3 * 40, "a bit for each element, in both directions"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_tie_is_positive_and_so_is_a_zero(ranks):
    def work(transport):
        mine = np.array([1, -1, 0, -0.0, -3], np.float32) * (1 if transport.rank % 2 else np.float32(-1))
        communicator, compressor = parse_stage("communicator", "majority"), grace_ext.compressor(SPEC)
        pending = communicator.start(transport, "b", compressor, mine, None, Stream(rank=transport.rank))
        out = np.empty(5, np.float32)
        assert communicator.finish(pending, transport, out, 1 / ranks)
        return out.tolist()

    expected = [-1, 1, 1, 1, 1] if ranks == 1 else [1, 1, 1, 1, 1]
    assert on_all_ranks(work, ranks) == [expected] * ranks


def test_a_rank_that_has_joined_has_no_vote_and_counts_those_of_the_others():
    gradients = [gauss(5000, rank) for rank in range(4)]

    def work(transport):
        communicator, compressor = parse_stage("communicator", "majority"), grace_ext.compressor(SPEC)
        stream = Stream(rank=transport.rank)
        if transport.rank == 3:
            pending = communicator.start_empty(transport, "b", compressor, 5000, stream)
        else:
            pending = communicator.start(transport, "b", compressor, gradients[transport.rank], None, stream)
        out = np.empty(5000, np.float32)
        assert communicator.finish(pending, transport, out, 1 / 4)
        return out.tolist()

    assert on_all_ranks(work, 4) == [votes(gradients[:3]).tolist()] * 4


def test_a_non_finite_gradient_reaches_every_rank():
    for at in (0, 4999):
        gradients = [gauss(5000, rank) for rank in range(RANKS)]
        gradients[1][at] = np.nan
        for out, finite, _ in exchange("majority", SPEC, gradients, 1 / RANKS):
            assert not finite and np.isnan(out).all()


def test_the_gradient_stays_as_it_is():
    communicator, mine = parse_stage("communicator", "majority"), gauss(100)
    communicator.start(InProcessGroup(1).transport(0), "b", grace_ext.compressor(SPEC), mine, None, Stream())
    assert (mine == gauss(100)).all()


def test_what_cannot_be_voted_on():
    def bucket(spec, memory):
        Bucket(
            "b",
            [Tensor("t", 5000, 2)],
            grace_ext.compressor(spec),
            parse_stage("communicator", "majority"),
            grace_ext.memory(memory),
        )

    bucket(SPEC, "none"), bucket(SPEC, "signum")
    for spec in ("dense/sign", "topk:0.1/sign:one", "dct/topk:0.1/rice/sign:one", "dense/onebit"):
        with pytest.raises(ConfigError, match="use dense/sign:one, not"):
            bucket(spec, "none")
    for memory in ("residual", "ef21", "dgc", "momentum"):
        with pytest.raises(ConfigError, match="use memory 'none' or 'signum'"):
            bucket(SPEC, memory)

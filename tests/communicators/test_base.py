"""What holds for any communicator."""

import numpy as np
import pytest
from support.communication import exchange
from support.in_process_ranks import RANKS, gradient

import grace_ext
from grace_ext import ConfigError
from grace_ext.pipeline import spec


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


def test_impossible_pairing_is_refused():
    with pytest.raises(ConfigError, match="allgather"):
        spec.parse_stage("communicator", "allreduce").check(grace_ext.compressor("topk:0.1"))
    spec.parse_stage("communicator", "allreduce").check(grace_ext.compressor("dense/fp16"))

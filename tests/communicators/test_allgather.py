"""allgather: the sum of all containers in the order of ranks."""

import numpy as np
import pytest
from support.communication import exchange
from support.in_process_ranks import RANKS, gradient, on_all_ranks

import grace_ext
from grace_ext._util.rng import Stream
from grace_ext.pipeline import spec


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

"""Ranks that run out of data take part with nothing."""

import numpy as np
import pytest
from support.exchanges import TENSORS, step
from support.in_process_ranks import RANKS, gradient, on_all_ranks

import grace_ext
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.shadow import shadow_step
from grace_ext.pipeline.spec import parse_stage


@pytest.mark.parametrize(
    "spec, communicator", [("topk:0.1/rice/raw", "allgather"), ("randomk:0.05", "allreduce"), ("dense/fp16", "allreduce")]
)
def test_ranks_that_run_out_of_data_shadow_the_steps_of_others(spec, communicator):
    """Rank r gives r gradients. What they do not get is a rank's own share; averages are over all ranks."""

    def work(transport):
        exchange = Exchange(transport, "none", 1 / transport.size, joinable=True)
        exchange.set_buckets(
            [exchange.bucket("bucket", TENSORS, grace_ext.compressor(spec), parse_stage("communicator", communicator))]
        )
        received = [step(exchange, gradient(10 * transport.rank + i))[0] for i in range(transport.rank)]

        def room(bucket):
            received.append(np.empty(bucket.size, np.float32))
            return received[-1]

        while shadow_step(exchange, room):
            pass
        return received, exchange.step

    results = on_all_ranks(work)
    for received, steps in results:
        assert steps == RANKS - 1
        for ours, theirs in zip(received, results[-1][0], strict=True):
            assert np.array_equal(ours, theirs)
    if spec == "dense/fp16":
        for i, out in enumerate(results[0][0]):
            np.testing.assert_allclose(out, sum(gradient(10 * rank + i) for rank in range(i + 1, RANKS)) / RANKS, atol=1e-2)

"""Exact steps between compressed ones."""

import numpy as np
import pytest
from support.exchanges import TENSORS, arrays_of, make, step
from support.in_process_ranks import gradient, on_all_ranks

from grace_ext.communicators.exact_steps import ExactSteps
from grace_ext.exchange.buckets import Bucket
from grace_ext.pipeline.compressor import make_compressor
from grace_ext.pipeline.spec import parse_stage


class Exact:
    """A memory's answers, by hand."""

    now = False

    def sends_exactly(self, name):
        assert name == "bucket"
        return self.now


def build(transport, communicator, spec="topk:0.1/rice/raw"):
    exchange, answers = make(transport, spec), Exact()
    compressor = make_compressor(spec)
    own = ExactSteps(parse_stage("communicator", communicator), answers, "bucket")
    exchange.set_buckets([Bucket("bucket", TENSORS, compressor, own, exchange.buckets[0].memory)])
    return exchange, answers


@pytest.mark.parametrize("communicator", ["allgather", "sharded", "hierarchical"])
def test_exact_steps_are_sums_and_leave_the_residual(communicator):
    """Compressed steps go on as if those between them had not been."""

    def work(transport):
        exchange, answers = build(transport, communicator)
        alone, _ = build(transport, communicator)
        exact = []
        for i in range(9):
            own = gradient(100 * transport.rank + i)
            answers.now = i % 3 == 1
            before = arrays_of(exchange)
            out, finite = step(exchange, own)
            assert finite
            if answers.now:
                after = arrays_of(exchange)
                assert all(np.array_equal(before[key], after[key]) for key in before)
                exact.append((own, out))
            else:
                alone.step = exchange.step - 1
                np.testing.assert_array_equal(out, step(alone, own)[0])
        return exact

    results = on_all_ranks(work)
    for steps in zip(*results, strict=True):
        mean = np.mean([own for own, _ in steps], axis=0)
        for _, out in steps:
            np.testing.assert_allclose(out, mean, rtol=0, atol=1e-6)
            np.testing.assert_array_equal(out, steps[0][1])


def test_it_says_what_the_step_is():
    def work(transport):
        exchange, answers = build(transport, "sharded")
        own = exchange.buckets[0].communicator
        for answers.now, expected in (
            (True, (("allreduce",), "float32", False, False)),
            (False, (("alltoall", "allgather"), "sharded", True, True)),
        ):
            found = own.collectives_of(transport), own.strategy, own.needs_memory, own.preserves_input
            assert found == expected
            assert own.max_collectives(transport) == 2 and own.switches and own.name == "sharded"
            assert exchange.stats()["ways"] == dict.fromkeys("ab", expected[1])
            assert exchange.bypass_dtype(exchange.buckets[0]) is None

    on_all_ranks(work)


@pytest.mark.parametrize("exact", [True, False])
def test_a_gradient_that_is_not_finite_reaches_all_ranks(exact):
    def work(transport):
        exchange, answers = build(transport, "allgather")
        answers.now = exact
        given = gradient(transport.rank)
        if transport.rank == 1:
            given[7] = np.inf
        out, finite = step(exchange, given)
        assert not finite and not np.isfinite(out).all()

    on_all_ranks(work)

"""The step's exchange: what is lost, what is remembered, and what an error leaves behind."""

import concurrent.futures
import contextlib
import functools
import threading

import numpy as np
import pytest
from support.exchanges import TENSORS, arrays_of, make, step
from support.in_process_ranks import RANKS, gradient, on_all_ranks

import grace_ext
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup


@pytest.mark.parametrize(
    "spec, communicator", [("topk:0.05/rice/raw", "allgather"), ("randomk:0.05", "allgather"), ("randomk:0.05", "allreduce")]
)
def test_nothing_is_lost_over_many_steps(spec, communicator):
    """Per rank: sum of gradients = sum of what was sent + residual. Over ranks: the averages are what was sent."""

    def work(transport):
        exchange = make(transport, spec, communicator)
        received = np.zeros(5000, np.float64)
        for i in range(20):
            received += step(exchange, gradient(100 * transport.rank + i))[0]
        state = arrays_of(exchange)
        return received, np.concatenate([state["residual:a"], state["residual:b"]])

    results = on_all_ranks(work)
    given = np.mean([sum(gradient(100 * rank + i).astype(np.float64) for i in range(20)) for rank in range(RANKS)], axis=0)
    residual = np.mean([result[1] for result in results], axis=0)
    for received, _ in results:
        np.testing.assert_allclose(received + residual, given, atol=1e-4)


@pytest.mark.parametrize(
    "spec, communicator, memory",
    [
        *[
            ("topk:0.05/rice/qsgd:7", way, memory)
            for way in ("allgather", "sharded", "tree", "hierarchical")
            for memory in ("residual", "none")
        ],
        *[("topk:0.05/rice/qsgd:7", "allgather", memory) for memory in ("ef21", "dgc:0.9")],
        ("dct:8/topk:0.1/raw/raw", "allgather", "residual"),
        ("dense/fp16", "allgather", "residual"),
        ("dense/fp16", "allreduce", "residual"),
        ("dense/raw", "allreduce", "none"),
        ("randomk:0.05", "allreduce", "residual"),
    ],
)
def test_a_gradient_may_stay_where_it_is(spec, communicator, memory):
    """Given in an array of the caller's, which stays as it is, or copied: the same results and states."""

    def work(transport, lends):
        exchange = Exchange(transport, memory, 1 / transport.size)
        exchange.set_buckets(
            [exchange.bucket("bucket", TENSORS, grace_ext.compressor(spec), parse_stage("communicator", communicator))]
        )
        (bucket,) = exchange.buckets
        results = []
        for i in range(3):
            given = gradient(10 * transport.rank + i)
            exchange.start(bucket, lambda out, given=given: given if lends else np.copyto(out, given))
            exchange.advance()
            results.append(np.empty(bucket.size, np.float32))
            exchange.finish(bucket, results[-1])
            assert exchange.end_step()
            np.testing.assert_array_equal(given, gradient(10 * transport.rank + i))
        return results, arrays_of(exchange)

    lent, copied = (on_all_ranks(lambda transport, lends=lends: work(transport, lends)) for lends in (True, False))
    for (results, states), (others, their_states) in zip(lent, copied, strict=True):
        np.testing.assert_array_equal(results, others)
        assert states.keys() == their_states.keys()
        for name, state in states.items():
            np.testing.assert_array_equal(state, their_states[name])


class Lent:
    """A Lender, as the PyTorch adapters have one for each bucket."""

    def __init__(self, size):
        self.out = np.full(size, np.nan, np.float32)


@pytest.mark.parametrize(
    "spec", ["topk:0.05/rice/qsgd:7", "topk:0.05:per=tensor/bloom:fpr=0.01/lloyd", "dct:8/topk:0.1/raw/raw"]
)
@pytest.mark.parametrize(
    "memory",
    ["residual", "residual:0.9", "residual:bits=8", "residual:bits=16:decay=0.9", "adam", "adam:bits=8", "momentum"],
)
def test_a_lent_buffer_spares_an_array_and_gives_the_same(spec, memory):
    """Steps that count, one with a NaN in another bucket of another rank, one that is given up, and one without the loan."""

    def work(transport, lends):
        exchange = Exchange(transport, memory, 1 / transport.size)
        parts = grace_ext.compressor(spec), parse_stage("communicator", "allgather")
        exchange.set_buckets([exchange.bucket(name, [Tensor(name, 2500, 2, shape=(50, 50))], *parts) for name in "ab"])
        lenders = {bucket.name: Lent(bucket.size) for bucket in exchange.buckets}
        results = []
        for i in range(8):
            for bucket in exchange.buckets:
                bucket.lender = lenders[bucket.name] if lends and i != 5 else None
                given = gradient(10 * transport.rank + i, 2500)
                given[7] = np.nan if i == 2 and transport.rank == 1 and bucket.name == "b" else given[7]
                exchange.start(bucket, lambda out, given=given: given)
            if i == 3:
                for bucket in exchange.buckets:
                    exchange.pending(bucket).handle.wait()
                exchange.abort()
                continue
            outs = {bucket.name: np.empty(bucket.size, np.float32) for bucket in exchange.buckets}
            for bucket in exchange.buckets:
                exchange.finish(bucket, outs[bucket.name])
            assert exchange.end_step() is (i != 2)
            for bucket in exchange.buckets:
                loaned = bucket.lender is not None
                results.append(lenders[bucket.name].out.copy() if loaned else outs[bucket.name])
                states = bucket.memory.states.values()
                kept = [state.current(bucket.name) for state in states if bucket.name in state.copies()]
                assert not any(np.shares_memory(lenders[bucket.name].out, array) for array in kept)
        assert exchange.statistics.steps == 7
        return results, arrays_of(exchange)

    lent, own = (on_all_ranks(lambda transport, lends=lends: work(transport, lends)) for lends in (True, False))
    for (results, states), (others, their_states) in zip(lent, own, strict=True):
        np.testing.assert_array_equal(results, others)
        assert states.keys() == their_states.keys()
        for name, state in states.items():
            np.testing.assert_array_equal(state, their_states[name])


def test_a_loan_is_used_only_where_the_result_can_wait():
    exchange = make(InProcessGroup(1).transport(0))
    (bucket,) = exchange.buckets
    assert not bucket.uses_loan
    for communicator, memory, expected in (
        ("allgather", "residual", True),
        ("sharded", "residual", False),
        ("allgather", "none", False),
        ("allgather", "ef21", False),
    ):
        (bucket,) = make(InProcessGroup(2).transport(0), communicator=communicator, memory=memory).buckets
        bucket.lender = Lent(bucket.size)
        assert bucket.uses_loan is expected


@pytest.mark.parametrize("parts", [(), ("randomk:0.01", "allreduce"), ("randomk:0.01/fp16", "allreduce")])
def test_a_non_finite_gradient_on_one_rank_leaves_every_memory(parts):
    def work(transport):
        exchange = make(transport, *parts)
        assert step(exchange, gradient(transport.rank))[1]
        before = arrays_of(exchange)
        bad = gradient(5)
        if transport.rank == 1:
            bad[17] = np.nan
        out, finite = step(exchange, bad)
        assert not finite and np.isnan(out).all()
        after = arrays_of(exchange)
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert step(exchange, gradient(9))[1]
        assert not np.array_equal(before["residual:a"], arrays_of(exchange)["residual:a"])

    on_all_ranks(work)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_non_finite_gradient_in_one_bucket_leaves_the_memories_of_all(bad):
    def work(transport):
        exchange = Exchange(transport, "residual", 1 / transport.size)
        compressor, communicator = grace_ext.compressor("topk:0.1/rice/qsgd:7"), parse_stage("communicator", "allgather")
        exchange.set_buckets([exchange.bucket(one.name, [one], compressor, communicator) for one in TENSORS])

        def step(nan):
            for i, bucket in enumerate(exchange.buckets):
                given = gradient(transport.rank)[: bucket.size]
                given[7] = np.nan if nan and i == bad and transport.rank == 0 else 1
                exchange.start(bucket, lambda out, given=given: np.copyto(out, given))
            for bucket in exchange.buckets:
                exchange.finish(bucket, np.empty(bucket.size, np.float32))
            return exchange.end_step()

        assert step(nan=False)
        before = arrays_of(exchange)
        assert not step(nan=True)
        after = arrays_of(exchange)
        assert all(np.array_equal(before[name], after[name]) for name in ("residual:a", "residual:b"))

    on_all_ranks(work)


def test_memory_follows_its_tensors_into_new_buckets():
    def work(transport):
        exchange = make(transport)
        step(exchange, gradient(transport.rank))
        before = arrays_of(exchange)
        swapped = [
            Bucket(
                f"new{i}",
                [tensor],
                grace_ext.compressor("topk:0.1"),
                parse_stage("communicator", "allgather"),
                exchange.memory_of(TENSORS[0]),
            )
            for i, tensor in enumerate(reversed(TENSORS))
        ]
        exchange.set_buckets(swapped)
        after = arrays_of(exchange)
        assert before.keys() == after.keys() == {"residual:a", "residual:b"}
        assert all(np.array_equal(before[name], after[name]) for name in before)

    on_all_ranks(work)


def test_an_error_in_the_worker_thread_surfaces_and_abort_cleans_up():
    def work(transport):
        exchange = make(transport)
        bucket = exchange.buckets[0]

        def pack(out):
            raise RuntimeError("no gradient today")

        exchange.start(bucket, pack)
        with pytest.raises(RuntimeError, match="no gradient today"):
            exchange.finish(bucket, np.empty(5000, np.float32))
        exchange.abort()
        assert not exchange.is_started(bucket)
        assert step(exchange, gradient(1))[1]

    on_all_ranks(work)


@pytest.mark.parametrize("communicator", ["allgather", "sharded"])
def test_after_an_error_nothing_more_of_the_step_is_sent(communicator):
    """Where collectives have no names, the other ranks would take what comes next for what did not come."""

    def work(transport):
        exchange = make(transport)
        exchange.set_buckets(
            [
                Bucket(
                    tensor.name,
                    [tensor],
                    grace_ext.compressor("topk:0.1/raw"),
                    parse_stage("communicator", communicator),
                    exchange.memory_of(tensor),
                )
                for tensor in (*TENSORS, Tensor("c", 1000, 2))
            ]
        )
        sent = []
        for collective in ("allgather", "alltoall"):
            plain = getattr(transport, collective)
            setattr(transport, collective, lambda name, *args, plain=plain: sent.append(name) or plain(name, *args))

        def pack(bucket, out):
            if bucket.name == "b":
                raise RuntimeError("no gradient today")
            np.copyto(out, gradient(1)[: bucket.size])

        def start():
            for bucket in exchange.buckets:
                exchange.start(bucket, functools.partial(pack, bucket))

        start()
        for bucket in reversed(exchange.buckets):
            with pytest.raises(RuntimeError, match="no gradient today"):
                exchange.finish(bucket, np.empty(bucket.size, np.float32))
        with pytest.raises(RuntimeError, match="no gradient today"):
            exchange.advance()
        assert len(sent) == 1 and "a" in sent[0], sent
        exchange.abort()
        start()
        with pytest.raises(RuntimeError, match="no gradient today"):  # and not of the step before
            exchange.finish(exchange.buckets[2], np.empty(1000, np.float32))
        assert len(sent) == 2

    on_all_ranks(work)


def test_an_exchange_without_buckets_may_be_given_up_or_closed():
    """As where its first buckets are refused."""
    exchange = Exchange(InProcessGroup(2).transport(0), "residual", 1.0, schedule={"density": "kimad"}, joinable=True)
    exchange.abort()
    exchange.close()
    assert exchange.stats()["steps"] == 0 and exchange.unfinished() == ()


def test_two_threads_may_start_the_first_buckets_of_a_step(monkeypatch):
    """As autograd does with a thread for each device: the step begins once."""
    exchange = Exchange(InProcessGroup(1).transport(0), "none", 1.0)
    exchange.set_buckets(
        [
            exchange.bucket(
                name, [Tensor(name, 50, 1)], grace_ext.compressor("dense/raw"), parse_stage("communicator", "allgather")
            )
            for name in "ab"
        ]
    )
    begun, both = [], threading.Barrier(2, timeout=1)

    def begin_step():
        begun.append(1)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()  # until the other one begins the step, too; which it must not

    monkeypatch.setattr(exchange, "begin_step", begin_step)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for _ in threads.map(lambda bucket: exchange.start(bucket, lambda out: out.fill(1.0)), exchange.buckets):
            pass
    assert begun == [1]
    for bucket in exchange.buckets:
        exchange.finish(bucket, np.empty(50, np.float32))


def test_buckets_that_a_listener_refuses_change_nothing():
    exchange = Exchange(InProcessGroup(2).transport(0), "residual", 1.0, schedule={"density": "kimad"})
    allgather, topk = parse_stage("communicator", "allgather"), grace_ext.compressor("topk:0.5")
    taken = [exchange.bucket("a", [Tensor("a", 50, 1)], topk, allgather)]
    exchange.set_buckets(taken)
    exchange.load_state_dict({"residual": {"a": np.ones(50, np.float32)}})
    refused = [exchange.bucket(name, [Tensor(name, 25, 1)], grace_ext.compressor("randomk:0.5"), allgather) for name in "bc"]
    with pytest.raises(grace_ext.ConfigError, match="same positions"):
        exchange.set_buckets(refused)
    assert exchange.buckets is taken and exchange.state_dict()["residual"]["a"].sum() == 50
    exchange.start(taken[0], lambda out: out.fill(0.0))
    assert exchange.unfinished() == ("a",)
    exchange.close()


def test_a_step_without_an_exchange_counts():
    exchange = Exchange(InProcessGroup(1).transport(0), "residual", 1.0)
    exchange.skip_step()
    assert exchange.step == exchange.stats()["steps"] == 1

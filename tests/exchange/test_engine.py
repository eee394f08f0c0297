"""The step's exchange: buckets, memory transactions, statistics; and the rules that choose specs."""

import concurrent.futures
import contextlib
import cProfile
import functools
import math
import pstats
import threading

import numpy as np
import pytest
from support.exchanges import TENSORS, arrays_of, make, step
from support.in_process_ranks import RANKS, gradient, on_all_ranks

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.buckets import Bucket, Tensor, make_buckets
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.shadow import shadow_step
from grace_ext.memory.none import NoMemory
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import DEFAULT_ROWS_SPEC, DEFAULT_SPEC, Rules
from grace_ext.transport import InProcessGroup


class Asleep(concurrent.futures.Executor):
    """A worker that never gets a core."""

    def submit(self, *_):
        pass


@pytest.mark.parametrize("communicator", ["allgather", "sharded"])
def test_a_caller_encodes_what_the_worker_has_not_begun(communicator):
    def work(transport, executor):
        exchange = make(transport, communicator=communicator, executor=executor)
        outs = [step(exchange, gradient(10 * transport.rank + i))[0] for i in range(3)]
        return outs, exchange.stats()

    alone = on_all_ranks(lambda transport: work(transport, Asleep()))
    usual = on_all_ranks(lambda transport: work(transport, None))
    for (outs, stats), (expected, _) in zip(alone, usual, strict=True):
        assert np.array_equal(outs, expected)
        encoding = sum(taken for stage, taken in stats["seconds"].items() if stage not in ("exchange", "decode"))
        assert encoding <= stats["exposed_seconds"] <= stats["late_seconds"]


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


def test_statistics_count_what_was_sent():
    def work(transport):
        exchange = make(transport)
        for i in range(3):
            step(exchange, gradient(i))
        return exchange.stats()

    for stats in on_all_ranks(work):
        assert stats["steps"] == 3 and stats["bytes_in"] == 3 * 4 * 5000
        blob = grace_ext.compressor("topk:0.1/rice/qsgd:7").compress(gradient(0), name="a")
        assert abs(stats["last_step"]["bytes_out"] - blob.size) < 40
        assert stats["compressed"]["ratio"] == stats["ratio"] == stats["bytes_in"] / stats["bytes_out"]
        assert {"select", "index", "value", "container", "residual", "exchange", "decode"} <= stats["seconds"].keys()
        assert stats["index_codecs"] == {"rice": 3} and stats["last_step"]["index_codecs"] == {"rice": 1}


def test_statistics_name_the_codecs_that_auto_chose():
    def work(transport):
        exchange = make(transport, "topk:0.5/auto/raw")
        clustered = (np.arange(5000) % 1000 < 300).astype(np.float32)
        for given in (clustered, gradient(1), np.full(5000, np.nan, np.float32)):
            step(exchange, given)
        return exchange.stats()["index_codecs"]

    for codecs in on_all_ranks(work):
        assert codecs == {"rle": 1, "bitmap": 1}


def test_buckets_respect_order_size_compressor_device_and_groups():
    dense, sparse = grace_ext.compressor("dense/raw"), grace_ext.compressor("topk:0.1")
    tensors = [
        Tensor("big", 5000, 2),
        Tensor("x", 600, 2),
        Tensor("bias", 10, 1),
        Tensor("y", 600, 2),
        Tensor("gpu", 600, 2, "cuda:0"),
        Tensor("z", 600, 2),
    ]

    def names(groups=None, limit=4 * 1300):
        lists = make_buckets(tensors, lambda t: dense if t.ndim == 1 else sparse, limit, groups)
        return sorted([t.name for t in members] for members in lists)

    assert names() == [["bias"], ["big"], ["gpu"], ["x", "y"], ["z"]]
    assert names(limit=1) == [["bias"], ["big"], ["gpu"], ["x"], ["y"], ["z"]]
    assert names(groups=[["big", "z"]], limit=1) == [["bias"], ["big", "z"], ["gpu"], ["x"], ["y"]]


def test_a_layout_keeps_apart_what_has_no_place_in_one_bucket():
    """Parts, specs, memories and tables."""
    exchange = Exchange(InProcessGroup(1).transport(0), {"*.kept": "residual", "*": "none"}, 1.0)
    parts = [
        [Tensor(name, 5000, 2, shape=(50, 100)) for name in names]
        for names in (["a", "a.kept", "table", "b"], ["c", "sparse", "d"])
    ]
    rules = Rules("topk:0.1", {"b": "dense/fp16", "sparse": "dense/raw"})
    buckets = build_buckets(exchange, parts, {"table", "sparse"}, rules, parse_stage("communicator", "allgather"), "first")
    found = {
        bucket.name: ([t.name for t in bucket.tensors], str(bucket.compressor), bucket.memory.name) for bucket in buckets
    }
    assert found == {
        "first.bucket0": (["a"], "topk:0.1/auto/raw", "none"),
        "first.bucket1": (["a.kept"], "topk:0.1/auto/raw", "residual"),
        "first.bucket2": (["b"], "dense/auto/fp16", "none"),
        "first.bucket3": (["c", "d"], "topk:0.1/auto/raw", "none"),
        "first.rows0": (["table"], "topk:0.1/rows:100/raw", "none"),
        "first.rows1": (["sparse"], "dense/rows:100/raw", "none"),
    }


@pytest.mark.parametrize("bucket_bytes", [math.inf, 1000])
def test_building_takes_work_in_proportion_to_the_number_of_tensors(bucket_bytes):
    """Counted in calls of functions, which do not depend on the machine. In one bucket, or two tensors in each."""

    def calls(count):
        exchange = Exchange(InProcessGroup(1).transport(0), "residual", 1.0)
        tensors = [Tensor(f"t{i}", 100, 2, shape=(10, 10)) for i in range(count)]
        profile = cProfile.Profile()
        profile.enable()
        buckets = build_buckets(
            exchange, [tensors], set(), Rules("topk:0.1"), parse_stage("communicator", "allgather"), "p", bucket_bytes
        )
        profile.disable()
        assert len(buckets) == (1 if bucket_bytes == math.inf else count // 2)
        return pstats.Stats(profile).total_calls

    calls(10)
    assert calls(800) < 2.1 * calls(400)


def test_a_bucket_refuses_an_impossible_communicator():
    with pytest.raises(ConfigError, match="allgather"):
        Bucket("b", TENSORS, grace_ext.compressor("topk:0.1"), parse_stage("communicator", "allreduce"), NoMemory())


def test_rules():
    rules = Rules("topk:0.02", {"*.bias": "dense/fp16", "emb*": "topk:0.5/bitmap", ">=1000000": "topk:0.001"})
    assert str(rules.choose("fc.bias", 5, 1)) == "dense/auto/fp16"
    assert str(rules.choose("embedding", 10, 2)) == "topk:0.5/bitmap/raw"
    assert rules.choose("fc.weight", 1_000_000, 2).sparsifier.density == 0.001
    assert rules.choose("fc.weight", 999_999, 2).sparsifier.density == 0.02
    assert rules.choose("norm.weight", 5000, 1).reducible_dtype == "float32"
    assert rules.choose("small", 1024, 2).reducible_dtype == "float32"
    assert str(rules.choose("embedding", 5000, 2, as_rows=True)) == "topk:0.5/bitmap/raw"
    assert rules.choose("table", 5000, 2, as_rows=True).sparsifier.density == 0.02
    assert Rules().choose("table", 5000, 2, as_rows=True) == grace_ext.compressor(DEFAULT_ROWS_SPEC)
    assert Rules().choose("table", 5000, 2) == grace_ext.compressor(DEFAULT_SPEC)
    assert Rules().choose("biases", 5000, 1, as_rows=True).reducible_dtype == "float32"
    for wrong in ("<=many", "<", "", 3):
        with pytest.raises(ConfigError, match="size"):
            Rules(rules={wrong: "dense"})
    with pytest.raises(ConfigError, match="known: "):
        Rules(rules={"*": "topkk"})


@pytest.mark.parametrize("differs", ["seed", "weight"])
def test_ranks_with_another_seed_or_weight_are_told(differs):
    """Random positions and rounding follow the seed; all ranks have to draw alike."""

    def layout(**options):
        exchange = Exchange(InProcessGroup(2).transport(0), "residual", **{"weight": 0.5, "seed": 0, **options})
        exchange.set_buckets(
            [
                exchange.bucket(
                    "bucket",
                    [Tensor("a", 50, 1)],
                    grace_ext.compressor("randomk:0.1"),
                    parse_stage("communicator", "allgather"),
                )
            ]
        )
        return exchange, exchange.config_digest()

    (exchange, first), (_, same), (_, other) = layout(), layout(), layout(**{differs: 1})
    exchange.check_config_digests(np.concatenate([first, same]))
    with pytest.raises(ConfigError, match=r"ranks \[1\] have other parameters, specs or options than rank 0"):
        exchange.check_config_digests(np.concatenate([first, other]))


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

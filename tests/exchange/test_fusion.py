"""Small buckets that share a collective, and buckets that are decoded while others are still to come."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.in_process_ranks import RANKS, gradient, on_all_ranks
from support.listeners import listener_of, without

import grace_ext
from grace_ext import ContainerError, ExchangeError
from grace_ext.communicators.base import Pending
from grace_ext.exchange import fusion
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.fusion import Fusion
from grace_ext.exchange.shadow import shadow_step
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy.auto_tuner import AutoTuner
from grace_ext.transport import CollectiveHandle, Transport

SIZES = (3000, 2000, 40_000, 10, 500)
TOPK = "topk:0.1/rice/raw"
ALL_TOPK = (TOPK,) * len(SIZES)


class Counting(Transport):
    """Keeps the names of all collectives. wrap(handle) -> what the exchange gets."""

    def __init__(self, transport, wrap=lambda handle: handle):
        self._transport, self._wrap = transport, wrap
        self.rank, self.size = transport.rank, transport.size
        self.names = []

    def __getattribute__(self, kind):
        if kind not in ("allgather", "allreduce", "alltoall", "broadcast"):
            return super().__getattribute__(kind)

        def start(name, *args):
            self.names.append(name)
            return self._wrap(getattr(self._transport, kind)(name, *args))

        return start


def make(transport, specs=ALL_TOPK, communicator="allgather", **options):
    exchange = Exchange(transport, "residual", 1 / transport.size, **options)
    exchange.set_buckets(
        [
            exchange.bucket(
                f"bucket{i}",
                [Tensor(f"t{i}", size, 2)],
                grace_ext.compressor(spec),
                parse_stage("communicator", communicator),
            )
            for i, (size, spec) in enumerate(zip(SIZES, specs, strict=True))
        ]
    )
    return exchange


def view(name, sketch=0, exact=False):
    """What Fusion sees of a bucket that sends containers."""
    return SimpleNamespace(
        name=name,
        communicator=SimpleNamespace(sends_containers=True),
        compressor=SimpleNamespace(exact=exact),
        memory=SimpleNamespace(sketch_size=lambda tensors: sketch),
        tensors=(),
    )


def parts_of(seed):
    return np.split(gradient(seed, sum(SIZES)), np.cumsum(SIZES)[:-1])


def start(exchange, given, early=False):
    out = [np.full(bucket.size, 7, np.float32) for bucket in exchange.buckets]
    for bucket, part, room in zip(exchange.buckets, given, out, strict=True):
        exchange.start(bucket, lambda to, part=part: np.copyto(to, part), room if early else None)
    return out


def step(exchange, given, early=False):
    out = start(exchange, given, early)
    exchange.advance()
    for bucket, room in zip(exchange.buckets, out, strict=True):
        exchange.finish(bucket, room)
    assert exchange.end_step()
    return np.concatenate(out)


def train(transport, fuse, steps=4, early=False, **options):
    transport = Counting(transport)
    transport.can_fuse = fuse
    exchange, received = make(transport, **options), []
    for i in range(steps):
        transport.names.clear()
        received.append(step(exchange, parts_of(100 * transport.rank + i), early))
    return np.stack(received), transport.names, exchange.stats()


@pytest.mark.parametrize("specs", [ALL_TOPK, (TOPK, "topk:0.01/rice/qsgd:7", "dense/raw", TOPK, "randomk:0.1")])
def test_containers_of_small_buckets_go_together_and_nothing_else_changes(specs, monkeypatch):
    monkeypatch.setattr(fusion, "MOST_BYTES", 4096)
    apart = on_all_ranks(lambda transport: train(transport, False, specs=specs))
    together = on_all_ranks(lambda transport: train(transport, True, specs=specs))
    for (received, names, stats), (plain, all_names, plain_stats) in zip(together, apart, strict=True):
        np.testing.assert_array_equal(received, plain)
        assert sorted(all_names) == [f"bucket{i}" for i in range(5)]
        assert len(names) < 5 and any(name.endswith(".fused") for name in names), names
        beside = stats["last_step"]["bytes_out"] - plain_stats["last_step"]["bytes_out"]
        assert beside == 4 * (5 - len(names) + sum(name.endswith(".fused") for name in names)), "lengths are counted"


@pytest.mark.parametrize("communicator", ["allgather", "sharded"])
def test_small_float32_buckets_go_with_containers(communicator):
    specs = ("dense/raw", TOPK, TOPK, "dense/raw", TOPK)
    apart = on_all_ranks(lambda transport: train(transport, False, specs=specs, communicator=communicator))
    together = on_all_ranks(lambda transport: train(transport, True, specs=specs, communicator=communicator))
    for (received, names, _), (plain, plain_names, _) in zip(together, apart, strict=True):
        np.testing.assert_allclose(received, plain, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(received, together[0][0])
        if communicator == "allgather":
            assert names == ["bucket0.fused"], names
        else:
            assert set(plain_names) - set(names) == {"bucket0", "bucket3"}
            assert set(names) - set(plain_names) == {"bucket0.fused"}


@pytest.mark.parametrize("sends", ["allgather", "sharded"])
def test_small_float32_buckets_go_with_containers_in_the_steps_in_which_auto_sends_some(sends):
    def work(given):
        transport = Counting(given)
        transport.probe_transport = lambda: given
        exchange = make(transport, specs=("dense/raw", TOPK, TOPK, "dense/raw", TOPK), communicator="auto")
        seen, received = [], []
        for i, strategy in enumerate([sends, sends, "float32", "float32", sends]):
            listener_of(exchange, AutoTuner)._switch_to((strategy,) * 3)
            listener_of(exchange, AutoTuner)._left = 10
            transport.names.clear()
            received.append(step(exchange, parts_of(100 * transport.rank + i)))
            seen.append(sorted(transport.names))
        return seen, np.stack(received)

    alone = [f"bucket{i}" for i in range(5)]
    elements = slice(0, 3000)  # those of bucket0
    for seen, received in (results := on_all_ranks(work)):
        apart, together, *dense_steps, later = seen
        assert dense_steps == [alone, alone] and together == later
        if sends == "allgather":
            assert (apart, together) == (alone, ["bucket0.fused"])
        else:
            assert set(apart) - set(together) == {"bucket0", "bucket3"} and "bucket0.fused" in together
        np.testing.assert_array_equal(received, results[0][1])
        for i, row in enumerate(received):
            given = [parts_of(100 * rank + i)[0] for rank in range(RANKS)]
            np.testing.assert_allclose(row[elements], np.mean(given, axis=0), rtol=1e-5, atol=1e-6)


def test_a_float32_bucket_that_is_not_finite_ends_the_step_on_all_ranks():
    def work(transport):
        exchange = make(transport, specs=("dense/raw", *ALL_TOPK[1:]))
        step(exchange, parts_of(transport.rank))
        given = parts_of(10 + transport.rank)
        given[0][5] = np.nan if transport.rank == 1 else 0
        out = start(exchange, given)
        exchange.advance()
        for bucket, room in zip(exchange.buckets, out, strict=True):
            exchange.finish(bucket, room)
        return exchange.end_step(), exchange.state_dict()["residual"]["t1"], np.isnan(out[0][5])

    for finite, residual, seen in on_all_ranks(work):
        assert not finite and residual.any() and seen


@pytest.mark.parametrize(
    ("ranks", "elements", "goes"),
    [
        (1, 32_768, True),
        (2, 32_768, True),
        (2, 32_769, False),
        (4, 5461, True),
        (4, 5462, False),
        (64, 132, True),
        (64, 135, False),
    ],
)
def test_float32_goes_with_containers_where_few_more_bytes_leave_a_rank(ranks, elements, goes):
    for can_fuse in (True, False):
        found = fusion.goes_with_containers(SimpleNamespace(size=ranks, can_fuse=can_fuse), elements)
        assert found == (goes and can_fuse)


def test_a_float32_bucket_joins_the_next_one_or_else_the_last():
    fused = Fusion(SimpleNamespace(size=1, can_fuse=True))
    for exact, groups in (("a", ["ab", "c"]), ("b", ["a", "bc"]), ("c", ["a", "bc"]), ("abc", ["abc"])):
        buckets = [view(name, exact=name in exact) for name in "abc"]
        fused.buckets_set(buckets)
        for bucket in buckets:
            fused.bucket_finished(0, bucket, Pending(None, 0, {}, received=40_000))
        fused.end_step(0, True, None)
        assert ["".join(bucket.name for bucket in group) for group in fused._groups] == groups


def test_large_containers_go_alone():
    (_, names, _), *_ = on_all_ranks(lambda transport: train(transport, True, specs=("dense/deflate",) * 5))
    assert sorted(names) == ["bucket0.fused", "bucket2", "bucket3.fused"], names


def test_other_communicators_go_alone():
    (_, names, _), *_ = on_all_ranks(lambda transport: train(transport, True, communicator="sharded"))
    assert not any(name.endswith(".fused") for name in names)


def test_ranks_that_have_joined_take_part():
    def work(transport):
        exchange = make(transport, joinable=True)
        received = [step(exchange, parts_of(10 * transport.rank + i)) for i in range(2 * transport.rank)]
        rooms = []

        def room(bucket):
            rooms.append(np.empty(bucket.size, np.float32))
            return rooms[-1]

        while shadow_step(exchange, room):
            received.append(np.concatenate(rooms))
            rooms.clear()
        return np.stack(received), listener_of(exchange, Fusion)._groups

    results = on_all_ranks(work)
    for received, groups in results:
        np.testing.assert_array_equal(received, results[0][0])
        assert max(map(len, groups)) > 1


@pytest.mark.parametrize(
    "data", [np.zeros(3, np.uint8), np.array([2**31, 0], "<u4").view(np.uint8), np.zeros(8 * RANKS + 1, np.uint8)]
)
def test_what_is_no_fused_message_is_an_error(data):
    class Wrong(Transport):
        rank, size = 0, RANKS

        def allgather(self, name, payload):
            return CollectiveHandle.finished(data)

    group = fusion._Group(RANKS, ["a", "b"])
    for name in "ab":
        group.add(Wrong(), name, np.empty(0, np.uint8))
    with pytest.raises(ContainerError, match="'a'"):
        group.handle_of("a").wait()


def test_a_collective_that_cannot_be_started_is_an_error_of_all_its_buckets():
    class Gone(Transport):
        rank, size = 0, RANKS

        def allgather(self, name, payload):
            raise ExchangeError("the others are gone")

    group = fusion._Group(RANKS, ["a", "b"])
    group.add(Gone(), "a", np.empty(0, np.uint8))
    with pytest.raises(ExchangeError, match="gone"):
        group.add(Gone(), "b", np.empty(0, np.uint8))
    with pytest.raises(ExchangeError, match="gone"):
        group.handle_of("a").wait()


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_a_bucket_that_cannot_be_encoded_is_an_error_of_those_that_it_goes_with(error):
    """Their rank would wait for itself. Found by tests/fuzz/faulty_ranks.py --seed 38."""

    def work(transport):
        exchange = make(transport)
        step(exchange, parts_of(transport.rank))

        def broken(**_):
            raise error("no room for bucket1")

        exchange.buckets[1].start = broken
        rooms = start(exchange, parts_of(transport.rank))
        with pytest.raises(error, match="no room for bucket1"):
            exchange.finish(exchange.buckets[0], rooms[0])
        exchange.abort()

    on_all_ranks(work)


def test_a_step_that_is_given_up_leaves_nobody_waiting():
    def work(transport):
        exchange = make(transport)
        for i in range(2):
            step(exchange, parts_of(i))
        waiting = []
        exchange.start(exchange.buckets[0], lambda out: np.copyto(out, parts_of(3)[0]))
        handle = exchange.pending(exchange.buckets[0]).handle
        thread = threading.Thread(target=lambda: waiting.append(pytest.raises(ExchangeError, handle.wait)))
        thread.start()
        exchange.abort()
        thread.join(10)
        assert len(waiting) == 1
        return step(exchange, parts_of(4))

    first, *others = on_all_ranks(work)
    assert all(np.array_equal(first, other) for other in others)


def test_groups_follow_the_sizes_of_containers(monkeypatch):
    monkeypatch.setattr(fusion, "_AGAIN", 2)
    fused = Fusion(SimpleNamespace(size=1, can_fuse=True))
    buckets = [view(name) for name in "abcd"]
    fused.buckets_set(buckets)
    for sizes, groups in (
        ((1000, 1000, 40_000, 10), ["ab", "c", "d"]),
        ((1,) * 4, None),
        ((20_000, 20_000, 10, 10), ["a", "bcd"]),
    ):
        for bucket, size in zip(buckets, sizes, strict=True):
            fused.bucket_finished(0, bucket, Pending(None, 0, {}, received=size))
        fused.end_step(0, True, None)
        if groups:
            assert ["".join(bucket.name for bucket in group) for group in fused._groups] == groups


def test_a_bucket_that_sends_no_containers_in_a_step_is_left_out_of_its_group():
    """As with communicator "auto", which may send it dense: the others must not wait for it."""
    fused = Fusion(SimpleNamespace(size=1, can_fuse=True))
    buckets = [view(name) for name in "abc"]
    fused.buckets_set(buckets)
    for bucket in buckets:
        fused.bucket_finished(0, bucket, Pending(None, 0, {}, received=1000))
    fused.end_step(0, True, None)
    buckets[1].communicator.sends_containers = False
    fused.step_started()
    assert [fused.started_together(bucket) for bucket in buckets] == [["a", "c"], [], ["a", "c"]]


def test_sketches_go_with_the_containers_of_their_buckets():
    fused = Fusion(SimpleNamespace(size=1, can_fuse=True))
    buckets = [view("a"), view("b", 8), view("c", 8)]
    fused.buckets_set(buckets)

    def payloads():
        fused.step_started()
        groups = [fused._open.get(bucket.name) for bucket in buckets]
        return [group and group.names for group in groups], [fused.started_together(bucket) for bucket in buckets]

    assert payloads() == ([None, ["b", "b.sketch"], ["c", "c.sketch"]], [[], ["b"], ["c"]])
    for bucket, received in zip(buckets, (1000, 1000, 40_000), strict=True):
        fused.bucket_finished(0, bucket, Pending(None, 0, {}, received=received))
    fused.end_step(0, True, None)
    together = ["a", "b", "b.sketch"]
    assert payloads() == ([together, together, ["c", "c.sketch"]], [["a", "b"], ["a", "b"], ["c"]])
    fused.end_step(0, True, None)
    buckets[1].communicator.sends_containers = False  # a sketch may go by itself, too
    assert payloads() == ([None, None, ["c", "c.sketch"]], [[], [], ["c"]])


def test_a_step_of_memory_adam_is_one_collective():
    def work(transport):
        counting = Counting(transport)
        exchange = Exchange(counting, "adam", 1 / transport.size)
        tensors = [Tensor(f"t{i}", size, 2, shape=(10, size // 10)) for i, size in enumerate(SIZES)]
        exchange.set_buckets(
            [exchange.bucket("b", tensors, grace_ext.compressor(TOPK), parse_stage("communicator", "allgather"))]
        )
        out = np.empty(sum(SIZES), np.float32)
        for seed in range(2):
            exchange.start(exchange.buckets[0], lambda to, seed=seed: np.copyto(to, gradient(seed, to.size)))
            exchange.finish(exchange.buckets[0], out)
            exchange.end_step()
        return [name for name in counting.names if "probe" not in name], out

    results = on_all_ranks(work)
    assert all(names == ["b.fused"] * 2 and np.array_equal(out, results[0][1]) for names, out in results)


def test_groups_do_not_depend_on_a_step_that_was_given_up():
    """In which ranks may have finished different buckets."""
    fused = Fusion(SimpleNamespace(size=1, can_fuse=True))
    buckets = [view(name) for name in "ab"]
    fused.buckets_set(buckets)
    fused.bucket_finished(0, buckets[0], Pending(None, 0, {}, received=40_000))
    fused.abort()
    for bucket in buckets:
        fused.bucket_finished(0, bucket, Pending(None, 0, {}, received=1000))
    fused.end_step(0, True, None)
    assert ["".join(bucket.name for bucket in group) for group in fused._groups] == ["ab"]


# Decoding in between


@pytest.mark.parametrize("communicator", ["allgather", "sharded", "tree"])
def test_what_has_arrived_is_decoded_while_others_are_to_come(communicator):
    """The last bucket is held back until the others' results are there, which the worker brings about by itself."""

    def work(transport):
        exchange = make(transport, communicator=communicator)
        without(exchange, Fusion)
        step(exchange, parts_of(transport.rank))
        out = [np.full(bucket.size, 7, np.float32) for bucket in exchange.buckets]
        *others, last = zip(exchange.buckets, parts_of(10 + transport.rank), out, strict=True)
        for bucket, part, room in others:
            exchange.start(bucket, lambda to, part=part: np.copyto(to, part), room)
        deadline = time.monotonic() + 600
        while not all((room != 7).any() for _, _, room in others):
            assert time.monotonic() < deadline, "nothing was decoded"
            time.sleep(0.01)
        bucket, part, room = last
        exchange.start(bucket, lambda to: np.copyto(to, part), room)
        exchange.advance()
        for bucket, room in zip(exchange.buckets, out, strict=True):
            exchange.finish(bucket, room)
        assert exchange.end_step()
        return np.concatenate(out)

    def plain(transport):
        exchange = make(transport, communicator=communicator)
        step(exchange, parts_of(transport.rank))
        return step(exchange, parts_of(10 + transport.rank))

    for early, late in zip(on_all_ranks(work), on_all_ranks(plain), strict=True):
        np.testing.assert_array_equal(early, late)


@pytest.mark.parametrize("communicator", ["allgather", "sharded", "tree"])
def test_many_steps_with_early_decoding_give_the_same(communicator):
    early = on_all_ranks(lambda transport: train(transport, True, 30, early=True, communicator=communicator))
    late = on_all_ranks(lambda transport: train(transport, False, 30, communicator=communicator))
    for (received, _, stats), (plain, _, _) in zip(early, late, strict=True):
        np.testing.assert_array_equal(received, plain)
        codecs = sum(taken for stage, taken in stats["seconds"].items() if stage != "exchange")
        assert 0 < stats["exposed_seconds"] and 0 < codecs


@pytest.mark.parametrize("communicator", ["allgather", "sharded"])
def test_a_step_that_is_given_up_is_not_looked_for_any_more(communicator):
    def work(transport):
        exchange = make(transport, communicator=communicator)
        without(exchange, Fusion)
        step(exchange, parts_of(0))
        out = [np.full(bucket.size, 7, np.float32) for bucket in exchange.buckets]
        bucket = exchange.buckets[0]
        if transport.rank == 0:  # the others never send theirs
            exchange.start(bucket, lambda to: np.copyto(to, parts_of(1)[0]), out[0])
            exchange.pending(bucket)
        exchange.abort()
        assert exchange._scheduler.run_collective(lambda: "free").result(5) == "free"
        assert all((room == 7).all() for room in out)

    on_all_ranks(work)


def test_an_error_while_decoding_early_surfaces_in_finish():
    def broken(handle):
        def wait():
            data = handle.wait().copy()
            data[data.size // 2] ^= 1
            return data

        return CollectiveHandle(wait, handle.poll)

    def work(transport):
        exchange = make(Counting(transport, broken))
        with pytest.raises(ContainerError):
            step(exchange, parts_of(transport.rank), early=True)
        exchange.abort()

    on_all_ranks(work)

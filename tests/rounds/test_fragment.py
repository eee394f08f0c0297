"""One exchange of pseudo-gradients: means, memories, weights, what is not finite, and what does not fit."""

import concurrent.futures
import math
import threading
import time

import numpy as np
import pytest
from support.in_process_ranks import on_all_ranks
from support.local_rounds import Worker, arrays

from grace_ext import ConfigError, ExchangeError
from grace_ext.means import SenderMean
from grace_ext.transport import CollectiveHandle, InProcessGroup
from grace_ext.transport.base import TransportWrapper

RANKS = 3
DENSE = {"compression": "dense/raw", "memory": "none"}


def residual(worker):
    found = {}
    for fragment in worker.rounds.fragments:
        found |= fragment.exchange.state_dict().get("residual", {})
    return np.concatenate([found.get(name, np.zeros(array.size, np.float32)) for name, array in worker.arrays.items()])


@pytest.mark.parametrize("communicator", ["allgather", "sharded", "tree", "hierarchical"])
@pytest.mark.parametrize(
    "compression, memory, outer",
    [
        ("topk:0.1/rice/qsgd:7", "residual:decay=0.95", "sgd"),
        ("topk:0.1/rice_adaptive/lloyd:0.25", "residual", "nesterov"),
        ("dense/qsgd:4", "residual:bits=8", "adam"),
        ("dense/raw", "none", "yogi"),
    ],
)
def test_all_ranks_have_the_same_bits_after_each_round(compression, memory, outer, communicator):
    def train(transport):
        worker = Worker(transport, compression=compression, memory=memory, outer=outer, communicator=communicator, steps=2)
        return [worker.train(2, first=2 * number).flat.copy() for number in range(4)]

    rows = on_all_ranks(train, RANKS)
    for one, *others in zip(*rows, strict=True):
        assert all(other.tobytes() == one.tobytes() for other in others)
    assert not np.array_equal(rows[0][0], rows[0][3])


@pytest.mark.parametrize("how", ["joins", "is not finite"])
def test_ef21_forgets_a_rank_that_does_not_count(how):
    """The others would add its last estimate to the mean for ever."""

    def train(transport):
        worker = Worker(transport, compression="dense/minmax:8", rules={"*": "dense/minmax:8"}, memory="ef21", steps=1)

        def step(number):
            for array in worker.arrays.values():
                array += np.float32([1, -1][worker.rank])

        worker.train(2, step=step)
        began = worker.shared.copy()
        if worker.rank == 0:
            worker.train(4, step=step)
            worker.rounds.join()
        elif how == "joins":
            worker.rounds.join()
        else:
            worker.train(4, step=lambda number: worker.arrays["a"].fill(np.nan))
            worker.rounds.join()
        return worker.shared - began

    for moved in on_all_ranks(train, 2):
        np.testing.assert_allclose(moved, 4, rtol=0.02)


def test_ef21_sends_differences_and_ranks_stay_equal():
    rows = on_all_ranks(lambda t: Worker(t, memory="ef21", rules={"*": "topk:0.2/rice/raw"}, steps=1).train(8).flat, RANKS)
    assert all(row.tobytes() == rows[0].tobytes() for row in rows)


def test_without_compression_a_round_with_sgd_is_the_mean_of_the_ranks():
    def train(transport):
        worker = Worker(transport, **DENSE, steps=3)
        worker.train(2)
        worker.move(2)
        before = worker.flat.copy()
        worker.rounds.step()
        return before, worker.flat

    rows = on_all_ranks(train, RANKS)
    np.testing.assert_allclose(rows[0][1], np.mean([before for before, _ in rows], axis=0), rtol=1e-5, atol=1e-6)


def test_diloco_is_what_its_algorithm_says():
    shared, velocity = start_flat(), 0.0
    for number in range(4):
        moved = np.mean([shared - trained(shared, rank, range(2 * number, 2 * number + 2)) for rank in range(RANKS)], axis=0)
        velocity = 0.9 * velocity + moved
        shared = shared - 0.7 * (moved + 0.9 * velocity)
    found = on_all_ranks(lambda t: Worker(t, **DENSE, outer="nesterov:0.7:momentum=0.9", steps=2).train(8).flat, RANKS)
    np.testing.assert_allclose(found[1], shared, rtol=1e-4, atol=1e-5)


def start_flat():
    return np.concatenate([array.ravel() for array in arrays().values()]).astype(np.float64)


def trained(flat, rank, steps):
    """Where the local steps of a rank lead, as Worker.move makes them."""
    flat = flat.copy()
    for step in steps:
        random, start = np.random.default_rng((rank, step)), 0
        for array in arrays().values():
            flat[start : start + array.size] -= 0.01 * random.standard_normal(array.shape).ravel()
            start += array.size
    return flat


@pytest.mark.parametrize("decay", [1.0, 0.95])
@pytest.mark.parametrize("spec", ["topk:0.05/rice/qsgd:7", "topk:0.05/rice_adaptive/lloyd:0.25", "dense/onebit"])
def test_what_was_sent_and_the_residual_are_what_was_produced(spec, decay):
    """With lr=1 the shared values move by the mean of what was sent."""

    def train(transport):
        worker, found = Worker(transport, rules={"*": spec}, memory=f"residual:decay={decay}", steps=2), []
        for number in range(5):
            worker.train(1, first=2 * number)
            worker.move(2 * number + 1)
            shared, produced, before = worker.shared.copy(), worker.shared - worker.flat, residual(worker)
            worker.rounds.step()
            found.append((produced, before, residual(worker), shared - worker.shared))
        return found

    for of_ranks in zip(*on_all_ranks(train, RANKS), strict=True):
        produced, before, after, sent = (np.mean(rows, axis=0, dtype=np.float64) for rows in zip(*of_ranks, strict=True))
        np.testing.assert_allclose(sent + after / decay, produced + before, rtol=1e-4, atol=2e-6)
        assert np.abs(after).max() > 1e-3, "something is left for later"


@pytest.mark.parametrize("samples, most", [((1, 3, 0), math.inf), ((1, 1e9, 0), 6)])  # two steps a round
def test_weights_by_samples_and_a_rank_without_any(samples, most):
    """A rank that claims more samples than the cap counts as if it had these."""

    def train(transport):
        worker = Worker(transport, **DENSE, steps=2, weights="samples", most=most)
        for number in range(2):
            worker.move(number)
            before = worker.flat.copy()
            worker.rounds.step(samples=samples[worker.rank])
        return before, worker.flat

    rows = on_all_ranks(train, RANKS)
    np.testing.assert_allclose(rows[0][1], 0.25 * rows[0][0] + 0.75 * rows[1][0], rtol=1e-5, atol=1e-6)
    assert all(after.tobytes() == rows[0][1].tobytes() for _, after in rows)


@pytest.mark.parametrize("spec", ["dense/raw", "topk:0.1/rice/qsgd:7"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_rank_that_is_not_finite_contributes_nothing_and_returns(spec, bad, caplog):
    """The others go on with the mean of theirs, its memory stays, and it takes over what the others have."""

    def train(transport):
        worker = Worker(transport, rules={"*": spec}, memory="none" if spec == "dense/raw" else "residual", steps=2)
        worker.train(3)
        worker.move(3)
        before, shared, kept = worker.flat.copy(), worker.shared.copy(), residual(worker)
        if worker.rank == 1:
            worker.arrays["b"][3, 3] = bad
        worker.rounds.step()
        first, memory = worker.flat.copy(), residual(worker)
        worker.train(2, first=4)
        return before, shared, kept, first, memory, worker.flat, worker.rounds.stats()["lost_rounds"]

    rows = on_all_ranks(train, RANKS)
    for at in (3, 5):
        assert np.isfinite(rows[0][at]).all() and all(row[at].tobytes() == rows[0][at].tobytes() for row in rows)
    assert [row[6] for row in rows] == [0, 1, 0]
    assert rows[1][2].tobytes() == rows[1][4].tobytes()
    assert spec == "dense/raw" or rows[0][2].tobytes() != rows[0][4].tobytes()
    if spec == "dense/raw":
        np.testing.assert_allclose(rows[0][3], (rows[0][0] + rows[2][0]) / 2, rtol=1e-5, atol=1e-6)
    assert "round 2: parameters or buffers of ranks [1] were not finite" in caplog.text


def test_a_round_in_which_no_rank_is_finite_changes_nothing():
    def train(transport):
        worker = Worker(transport, steps=2, outer="nesterov")
        worker.train(3)
        saved = worker.rounds.fragments[0].state_dict()
        worker.arrays["a"][:] = np.nan
        worker.rounds.step()
        after = worker.rounds.fragments[0].state_dict()
        assert saved.pop("round") + 1 == after.pop("round")
        same = all(mine.tobytes() == theirs.tobytes() for mine, theirs in zip(leaves(saved), leaves(after), strict=True))
        return same, worker.flat.tobytes() == worker.shared.tobytes(), worker.train(2, first=4).flat

    rows = on_all_ranks(train, RANKS)
    assert all(row[0] and row[1] for row in rows)
    assert all(row[2].tobytes() == rows[0][2].tobytes() for row in rows) and np.isfinite(rows[0][2]).all()


def leaves(state):
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in leaves(value)]
    return [state] if isinstance(state, np.ndarray) else []


def test_a_sum_that_overflows_takes_all_ranks_back():
    def train(transport):
        transport.can_fuse = False  # so that float32 is summed by an allreduce, before it is divided
        worker = Worker(transport, **DENSE, steps=1)
        worker.train(1)
        before = worker.shared.copy()
        worker.arrays["a"][0, 0] = np.float32(-3e38)  # finite on each rank
        worker.rounds.step()
        return before, worker.flat

    for before, after in on_all_ranks(train, RANKS):
        assert before.tobytes() == after.tobytes()


def test_buffers_are_averaged_and_those_of_a_bad_rank_are_not():
    def train(transport):
        rank = transport.rank
        worker = Worker(
            transport, steps=1, buffers={"mean": np.full(2, rank + 1, np.float32), "var": np.ones(3, np.float32)}
        )
        worker.train(1)
        first = worker.buffers["mean"].copy()
        worker.buffers["mean"][:] = np.nan if rank == 0 else 10 * rank
        worker.train(1, first=1)
        return first, worker.buffers["mean"], worker.flat

    for first, second, flat in (rows := on_all_ranks(train, RANKS)):
        assert (first == 2).all() and (second == 15).all() and flat.tobytes() == rows[0][2].tobytes()


class Counting(TransportWrapper):
    """Counts the bytes that a rank hands to collectives."""

    def __init__(self, transport):
        super().__init__(transport)
        self.bytes = 0

    def start_collective(self, kind, name, array, *args):
        self.bytes += array.nbytes
        return super().start_collective(kind, name, array, *args)


@pytest.mark.parametrize("communicator", ["allgather", "sharded"])
def test_all_bytes_are_counted(communicator):
    def train(transport):
        counting = Counting(transport)
        buffers = {"mean": np.zeros(2, np.float32)}
        worker = Worker(counting, steps=2, communicator=communicator, fragments=2, buffers=buffers)
        worker.train(3)
        before, already = worker.rounds.stats(), counting.bytes
        worker.train(8, first=3)
        stats = worker.rounds.stats()
        counted = [now["bytes_out"] + now["other_bytes_out"] for now in (before, stats)]
        return counting.bytes - already, counted[1] - counted[0], stats["bytes_out"]

    for seen, counted, pseudo_gradients in on_all_ranks(train, RANKS):
        assert seen == counted > pseudo_gradients / 2 > 0


class Ordering(TransportWrapper):
    """Notes what a rank sends, and when it begins to wait."""

    def __init__(self, transport):
        super().__init__(transport)
        self.seen = []

    def start_collective(self, kind, name, array, *args):
        handle = super().start_collective(kind, name, array, *args)
        self.seen.append(name.rpartition(".")[2])

        def wait():
            self.seen.append("wait")
            return handle.wait()

        return CollectiveHandle(wait)


@pytest.mark.parametrize("mean, sent", [(SenderMean(), ["header", "buffers", "bucket"]), (None, ["header"])])
def test_what_does_not_depend_on_other_ranks_goes_with_the_header(mean, sent):
    """Else a round takes one latency of the link more. With the weighted mean, a rank's share has to be known first."""

    def train(transport):
        ordering = Ordering(transport)
        options = {"compression": "topk:0.1/rice/raw", "mean": mean, "buffers": {"mean": np.ones(2, np.float32)}}
        worker = Worker(ordering, steps=1, **options)
        worker.train(2)
        ordering.seen.clear()
        worker.train(1, first=2)
        return ordering.seen[: ordering.seen.index("wait")]

    for seen in on_all_ranks(train, RANKS):
        # Both buckets in one collective, or in two.
        assert list(dict.fromkeys(name.rstrip("01") if name != "fused" else "bucket" for name in seen)) == sent, seen


def test_all_ranks_begin_with_the_parameters_of_rank_0():
    starts = on_all_ranks(lambda t: Worker(t, start=arrays(t.rank), steps=5).flat, RANKS)
    wanted = np.concatenate([array.ravel() for array in arrays(0).values()])
    assert all(start.tobytes() == wanted.tobytes() for start in starts)


def refused(function, error, ranks=2):
    """What each rank's error says; all of them have to raise one."""

    def work(transport):
        with pytest.raises(error) as caught:
            function(transport)
        return str(caught.value)

    return on_all_ranks(work, ranks)


@pytest.mark.parametrize(
    "options",
    [
        lambda rank: {"outer": f"sgd:{rank + 1}"},
        lambda rank: {"compression": f"topk:0.{rank + 1}/rice/raw"},
        lambda rank: {"steps": rank + 2},
        lambda rank: {"memory": f"residual:decay=0.{rank + 1}"},
    ],
)
def test_ranks_that_are_set_up_differently_are_refused(options):
    for said in refused(lambda t: Worker(t, **{"steps": 2, **options(t.rank)}), ConfigError):
        assert "rank 0" in said


@pytest.mark.parametrize("memory", ["dgc", "momentum", "adam", "muon", "demo"])
def test_memories_for_gradients_are_refused(memory):
    for said in refused(lambda t: Worker(t, memory=memory, steps=2), ConfigError):
        assert memory in said and "residual" in said


def test_ranks_in_different_rounds_are_refused_and_nobody_goes_on():
    def train(transport):
        worker = Worker(transport, steps=1)
        worker.train(2)
        if transport.rank:
            worker.rounds.fragments[0].step += 1
        worker.train(1)

    for said in refused(train, ExchangeError):
        assert "differ in step of the round: [3, 4]" in said


def test_after_an_error_the_next_round_says_so():
    def train(transport):
        worker = Worker(transport, steps=1)

        def broken(*_, **__):
            raise MemoryError("no room")

        worker.rounds.fragments[0].exchange.buckets[0].start = broken
        with pytest.raises(MemoryError):
            worker.train(1)
        worker.train(1)

    for said in refused(train, ExchangeError):
        assert "an earlier round failed" in said


def test_a_rank_that_is_waited_for_can_be_seen():
    """What the watchdog looks at, while the other rank has not begun its round."""
    group, looks = InProcessGroup(2, 60.0), []
    first, second = threading.Event(), threading.Event()

    def work(rank):
        worker = Worker(group.transport(rank), steps=1)
        fragment = worker.rounds.fragments[0]
        if rank:
            assert first.wait(60)
            looks.append(fragment.unfinished())
            second.wait(60)
        else:
            threading.Thread(target=look, args=(fragment,)).start()
        worker.train(1)
        return fragment.unfinished()

    def look(fragment):
        while not fragment.unfinished():
            time.sleep(0.001)
        first.set()
        looks.append(fragment.unfinished())
        second.set()

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [(), ()]
    assert sorted(looks) == [(), ("rounds0.round",)]


@pytest.mark.parametrize("schedule", ["warmup:steps=3:start=0.5:stages=3", "kimad:5:prior=1e6"])
def test_densities_follow_a_schedule_of_rounds(schedule):
    def train(transport):
        worker, sent = Worker(transport, steps=2, schedule={"density": schedule}), []
        for number in range(5):
            worker.train(2, first=2 * number)
            sent.append(worker.rounds.stats()["last_step"]["compressed"]["bytes_out"])
        return worker.flat, sent, worker.rounds.stats()["densities"]

    rows = on_all_ranks(train, RANKS)
    assert all(row[0].tobytes() == rows[0][0].tobytes() for row in rows)
    for _, sent, densities in rows:
        if schedule.startswith("kimad"):
            assert set(densities) == {"a", "b", "c"} and all(0 < density <= 1 for density in densities.values())
        else:
            assert sent[0] > 1.5 * sent[1] > 2 * sent[3] and abs(sent[3] - sent[4]) < 0.1 * sent[3], sent

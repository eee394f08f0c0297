"""When fragments are exchanged and applied, joining, and resuming, with ranks as threads of this process."""

import copy
import threading

import numpy as np
import pytest
from support.in_process_ranks import on_all_ranks
from support.local_rounds import SHAPES, Worker, arrays

from grace_ext import ConfigError, ExchangeError
from grace_ext.rounds import AutoSteps
from grace_ext.transport import InProcessGroup

RANKS = 3
DENSE = {"compression": "dense/raw", "memory": "none"}
STREAMING = {"fragments": 3, "steps": 6, "delay": 1}


def same(rows):
    assert all(row.tobytes() == rows[0].tobytes() for row in rows), "ranks hold different bits"


def streamed(steps, fragments, length, delay, keep, lr=0.7, momentum=0.9):
    """Streaming DiLoCo without compression, of all ranks: the algorithm of the paper, one loop for everything."""
    parameters = [{name: array.astype(np.float64) for name, array in arrays().items()} for _ in range(RANKS)]
    shared = {name: array.astype(np.float64) for name, array in arrays().items()}
    velocity, under_way = dict.fromkeys(SHAPES, 0.0), {}
    for step in range(steps):
        for rank in range(RANKS):
            random = np.random.default_rng((rank, step))
            for array in parameters[rank].values():
                array -= 0.01 * random.standard_normal(array.shape)
        now = step + 1
        for number, names in enumerate(fragments):
            offset = number * length // len(fragments)
            if now > 0 and (now - offset) % length == 0:
                moved = {
                    name: np.mean([shared[name] - parameters[rank][name] for rank in range(RANKS)], axis=0) for name in names
                }
                began = [{name: parameters[rank][name].copy() for name in names} for rank in range(RANKS)]
                under_way[number] = now + delay, moved, began
            if number in under_way and under_way[number][0] == now:
                _, moved, began = under_way.pop(number)
                for name, change in moved.items():
                    velocity[name] = momentum * velocity[name] + change
                    shared[name] = shared[name] - lr * (change + momentum * velocity[name])
                    for rank in range(RANKS):
                        own = parameters[rank][name]
                        if keep == "moves":
                            parameters[rank][name] = shared[name] + own - began[rank][name]
                        else:
                            parameters[rank][name] = keep * own + (1 - keep) * shared[name]
    return [np.concatenate([array.ravel() for array in of_rank.values()]) for of_rank in parameters]


@pytest.mark.parametrize(
    "length, delay, keep",
    [(6, 1, 0.5), (7, 0, 0.0), (9, 2, 0.0), (3, 0, 0.0), (9, 2, "moves"), (6, 1, "moves"), (7, 0, "moves")],
)
def test_streaming_is_what_its_algorithm_says(length, delay, keep):
    fragments = [["a"], ["b*"], ["*"]]
    names = [["a"], ["bias", "b"], ["c"]]

    def train(transport):
        options = {"outer": "nesterov:0.7:momentum=0.9", "delay": delay, "keep": keep, "fragments": fragments}
        worker = Worker(transport, **DENSE, steps=length, **options)
        return worker.train(25).flat

    for found, wanted in zip(on_all_ranks(train, RANKS), streamed(25, names, length, delay, keep), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_streaming_ranks_share_is_the_same_and_so_are_parameters_after_synchronize():
    def train(transport):
        worker = Worker(transport, **STREAMING, outer="nesterov")
        worker.train(21)
        between = worker.flat.copy()
        worker.rounds.synchronize()
        return between, worker.flat.copy(), worker.shared, worker.train(13, first=21).shared

    rows = on_all_ranks(train, RANKS)
    assert rows[0][0].tobytes() != rows[1][0].tobytes()
    for at in (1, 2, 3):
        same([row[at] for row in rows])
    assert rows[0][1].tobytes() == rows[0][2].tobytes()


def test_with_a_delay_local_steps_go_on_during_an_exchange():
    """Rank 0 is a whole delay ahead before rank 1 begins its round."""
    group, ahead = InProcessGroup(2, 60.0), threading.Event()

    def work(rank, found):
        worker = Worker(group.transport(rank), steps=4, delay=3)
        if rank:
            assert ahead.wait(50), "rank 0 waits for the exchange"
        worker.train(6)
        ahead.set()
        found[rank] = worker.train(1, first=6).shared

    found = {}
    threads = [threading.Thread(target=work, args=(rank, found)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same([found[0], found[1]])


def test_moves_during_an_exchange_count_once():
    """What was moved altogether is in what the ranks share, or in the memories."""
    steps, start = 23, np.concatenate([array.ravel() for array in arrays().values()])

    def train(transport):
        worker = Worker(transport, steps=5, delay=3, compression="topk:0.02/raw/raw")
        worker.train(steps)
        worker.rounds.synchronize()
        [memory] = worker.rounds.state_dict()["turns"][0]["fragment"]["exchange"]["memories"].values()
        return worker.shared, np.concatenate(
            [memory["residual"].get(name, np.zeros(np.prod(shape))) for name, shape in SHAPES.items()]
        )

    rows = on_all_ranks(train, RANKS)
    moved = np.mean(on_all_ranks(lambda t: Worker(t, steps=100).train(steps).flat, RANKS), axis=0) - start
    waiting = np.mean([residual for _, residual in rows], axis=0)
    np.testing.assert_allclose(rows[0][0] - waiting, start + moved, rtol=1e-4, atol=1e-5)


def test_with_a_delay_too_a_rank_that_is_not_finite_returns_to_what_is_shared():
    """It is not finite when an exchange begins, and again while one is under way."""

    def train(transport):
        worker = Worker(transport, steps=4, delay=2)
        for step in range(20):
            worker.move(step)
            if worker.rank == 0 and step in (3, 9):
                worker.arrays["a"][0, 0] = np.nan
            worker.rounds.step()
        worker.rounds.synchronize()
        return worker.flat, worker.rounds.lost

    rows = on_all_ranks(train, 2)
    same([row[0] for row in rows])
    assert np.isfinite(rows[0][0]).all()
    assert [row[1] for row in rows] == [2, 0]


def test_rounds_to_which_nobody_contributes_are_no_steps_of_the_outer_optimizer():
    def train(transport):
        worker = Worker(transport, steps=2, outer="adam")
        for number in range(3):
            worker.train(2, first=2 * number)
            worker.rounds.synchronize()  # again, where the round has just ended
        return worker.flat

    plain = on_all_ranks(lambda t: Worker(t, steps=2, outer="adam").train(6).flat, 2)
    same([*plain, *on_all_ranks(train, 2)])


def test_steps_by_round():
    """Short rounds at first."""

    def train(transport):
        worker, rounds = Worker(transport, steps=lambda number: min(number, 3)), []
        for step in range(10):
            worker.move(step)
            if worker.rounds.step():
                rounds.append(step)
        return rounds

    assert on_all_ranks(train, 2) == [[0, 2, 5, 8]] * 2


def test_rounds_of_a_time_take_as_many_steps_as_fit():
    """Rank 1 is three times slower."""

    def train(transport):
        now = [0.0]
        worker = Worker(transport, **DENSE, seconds=9.0, clock=lambda: now[0])
        for step in range(9 if transport.rank == 0 else 3):
            now[0] += 1.0 if transport.rank == 0 else 3.0
            worker.move(step)
            before = worker.flat.copy()
            ended = worker.rounds.step()
            assert ended == (now[0] >= 9)
        return before, worker.flat, worker.rounds.steps

    (first, after, nine), (second, also, three) = on_all_ranks(train, 2)
    assert (nine, three) == (9, 3)
    same([after, also])
    np.testing.assert_allclose(after, (first + second) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"steps": 3}, {"steps": 3, "weights": "samples"}, STREAMING, {**STREAMING, "fragments": 2}]
)
def test_ranks_with_fewer_steps_join_the_rounds_of_the_others(options):
    def train(transport):
        worker = Worker(transport, **options)
        worker.train((4, 20, 13)[transport.rank])
        worker.rounds.join()
        return worker.flat, worker.rounds.stats()["local_steps"], worker.rounds.stats()["rounds"]

    rows = on_all_ranks(train, RANKS)
    same([row[0] for row in rows])
    assert [row[1] for row in rows] == [4, 20, 13] and len({row[2] for row in rows}) == 1


def test_what_a_rank_has_done_before_it_joined_counts_once():
    def train(transport):
        worker = Worker(transport, **DENSE, steps=4)
        steps = (6, 8)[transport.rank]
        worker.train(steps - 1)
        worker.move(steps - 1)
        before = worker.flat.copy()
        if transport.rank == 0:
            worker.rounds.steps += 1  # its last step ends no round
            for turn in worker.rounds._turns:
                turn.steps += 1
        else:
            worker.rounds.step()
        worker.rounds.join()
        return before, worker.flat

    (first, after), (second, also) = on_all_ranks(train, 2)
    same([after, also])
    np.testing.assert_allclose(after, (first + second) / 2, rtol=1e-5, atol=1e-6)


CASES = {
    "rounds": {"steps": 4, "outer": "nesterov"},
    "bits": {"steps": 4, "outer": "adam", "memory": "residual:bits=8", "compression": "dense/qsgd:4"},
    "samples": {"steps": 4, "outer": "sgd:1:momentum=0.5", "weights": "samples", "memory": "residual:decay=0.95"},
    "streaming": {**STREAMING, "outer": "yogi"},
    "nothing stays": {"steps": 4, "delay": 2, "keep": 0.0},
    "delay": {"steps": 4, "delay": 3, "keep": 0.25, "outer": "nesterov", "compression": "dense/qsgd:4"},
}


@pytest.mark.parametrize("at", [7, 8, 9, 12])
@pytest.mark.parametrize("case", CASES)
def test_resuming_is_bit_for_bit(case, at):
    """In the middle of a round, at its end, and while an exchange is under way."""

    def buffers():
        return {"mean": np.zeros(4, np.float32)}

    def go_on(worker, first, steps):
        for step in range(first, first + steps):
            worker.move(step)
            worker.buffers["mean"] += np.float32(worker.rank + step)
            worker.rounds.step(samples=worker.rank + step % 3)

    def train(transport):
        worker = Worker(transport, buffers=buffers(), **CASES[case])
        go_on(worker, 0, at)
        saved = copy.deepcopy((worker.rounds.state_dict(), worker.arrays, worker.buffers))
        go_on(worker, at, 13)
        state = worker.rounds.state_dict()  # it waits for what is under way
        return saved, (worker.flat, worker.shared, worker.buffers["mean"], state)

    whole = on_all_ranks(train, RANKS)

    def resume(transport):
        state, parameters, buffers = whole[transport.rank][0]
        worker = Worker(transport, start=arrays(9), buffers={"mean": np.ones(4, np.float32)}, **CASES[case])
        worker.rounds.load_state_dict(state)
        for name, array in parameters.items():
            worker.arrays[name][:] = array
        worker.buffers["mean"][:] = buffers["mean"]
        go_on(worker, at, 13)
        state = worker.rounds.state_dict()
        return worker.flat, worker.shared, worker.buffers["mean"], state

    for (_, wanted), found in zip(whole, on_all_ranks(resume, RANKS), strict=True):
        for mine, theirs in zip(found[:3], wanted[:3], strict=True):
            assert mine.tobytes() == theirs.tobytes()
        assert equal(found[3], wanted[3])


def equal(mine, theirs):
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(equal(mine[key], theirs[key]) for key in mine)
    return np.array_equal(mine, theirs)


def test_other_numbers_of_ranks_go_on_with_the_sum_of_the_residuals():
    states = on_all_ranks(lambda t: Worker(t, steps=2, outer="nesterov").train(4).rounds.state_dict(), 2)

    def residuals(state):
        memories = state["turns"][0]["fragment"]["exchange"]["memories"].values()
        return [np.concatenate([memory["residual"][name] for name in ("a", "b", "c")]) for memory in memories]

    saved = copy.deepcopy(states[0])
    for state in states:
        exchange = saved["turns"][0]["fragment"]["exchange"]
        exchange["memories"] |= state["turns"][0]["fragment"]["exchange"]["memories"]

    def resume(transport):
        worker = Worker(transport, steps=2, outer="nesterov")
        worker.rounds.load_state_dict(saved)
        worker.rounds.show_shared()
        [own] = residuals(worker.rounds.state_dict())
        return own, worker.train(4, first=4).flat

    rows = on_all_ranks(resume, 3)
    same([row[1] for row in rows])
    np.testing.assert_allclose(sum(row[0] for row in rows), sum(residuals(saved)), rtol=1e-5, atol=1e-6)


def settled(state):
    """The residuals of a rank, joined."""
    memories = [
        memory["residual"]
        for turn in state["turns"].values()
        for memory in turn["fragment"]["exchange"]["memories"].values()
    ]
    return np.concatenate([memory[name] for name in sorted(SHAPES) for memory in memories if name in memory])


@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("case", [*CASES, "auto"])
def test_rounds_go_on_when_ranks_leave_and_come(case, now):
    """What the ranks share goes on, and new ranks take it over; the sum of residuals is kept."""
    options = {"steps": AutoSteps(least=3)} if case == "auto" else CASES[case]

    def begin(transport):
        worker = Worker(transport, **options).train(13)
        worker.rounds.show_shared()
        if case == "auto":
            worker.rounds._length.steps = 5
        return worker

    earlier = on_all_ranks(begin, RANKS)
    spread = sum(settled(worker.rounds.state_dict()) for worker in earlier[:now])

    def go_on(transport):
        before = earlier[transport.rank] if transport.rank < RANKS else None
        worker = Worker(transport, start=arrays(9), before=before, **options)
        began, rounds = worker.flat.copy(), worker.rounds.stats()["rounds"]
        assert case != "auto" or worker.rounds._length.steps == 5
        for fragment in worker.rounds.fragments:
            worker.executor.submit(fragment._settle).result()
        kept = settled(worker.rounds.state_dict())
        worker.train(13, first=13)
        worker.rounds.synchronize()
        stats = worker.rounds.stats()
        return began, rounds, kept, worker.flat, stats["local_steps"], stats["bytes_in"]

    rows = on_all_ranks(go_on, now)
    same([earlier[0].flat, *(row[0] for row in rows)])
    assert {row[1] for row in rows} == {earlier[0].rounds.stats()["rounds"]}
    np.testing.assert_allclose(sum(row[2] for row in rows), spread, rtol=1e-5, atol=1e-3 if case == "bits" else 1e-6)
    same([row[3] for row in rows])
    assert rows[0][3].tobytes() != rows[0][0].tobytes()
    assert [row[4] for row in rows] == [26 if rank < RANKS else 13 for rank in range(now)]
    assert all(row[5] > earlier[0].rounds.stats()["bytes_in"] for row in rows[:RANKS])


@pytest.mark.parametrize("options", [{"steps": 4}, {"steps": 6, "fragments": 2, "delay": 2}], ids=str)
def test_a_state_brings_the_parameters_of_a_rank_amid_a_round(options):
    """Rounds that are made after the model was loaded give all ranks the parameters of the first."""

    def resume(transport):
        worker = Worker(transport, **options).train(6 if "fragments" in options else 5)
        state, after = worker.rounds.state_dict(), worker.train(9, first=6).flat
        again = Worker(transport, start=arrays(7), **options)
        again.rounds.load_state_dict(state)
        assert again.train(9, first=6).flat.tobytes() == after.tobytes()
        done = Worker(transport, steps=4).train(4).rounds.state_dict()
        assert not done["own"]  # they are the shared ones
        with pytest.raises(ConfigError, match="of another model; they differ in a, none"):
            again.parameters.load_own({"a": np.zeros(1, np.uint8), "none": np.zeros(1, np.uint8)})

    on_all_ranks(resume, 2)


def test_a_checkpoint_on_some_ranks_only_is_refused_by_all():
    states = on_all_ranks(lambda t: Worker(t, steps=2).train(4).rounds.state_dict(), 2)

    def resume(transport):
        worker = Worker(transport, steps=2)
        if transport.rank == 0:
            worker.rounds.load_state_dict(states[0])
        with pytest.raises(ConfigError, match=r"ranks \[1\] start from another state than rank 0"):
            worker.train(2)

    on_all_ranks(resume, 2)


@pytest.mark.parametrize(
    "other, said",
    [
        ({"fragments": 2, "steps": 4}, "of 1 fragments, and there are 2"),
        ({"steps": 4, "outer": "nesterov"}, "outer state of 'a'"),
        ({"steps": 4, "start": arrays(shapes={"a": (4, 5)})}, "shared values are of other tensors"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(other, said):
    def load(transport):
        state = Worker(transport, steps=4).train(5).rounds.state_dict()
        worker = Worker(transport, **other)
        before = worker.rounds.state_dict()
        with pytest.raises(ConfigError, match=said):
            worker.rounds.load_state_dict(state)
        with pytest.raises(ConfigError, match="version 7; known: 2"):
            worker.rounds.load_state_dict({**state, "version": 7})
        assert equal(before, worker.rounds.state_dict())

    on_all_ranks(load, 2)


def test_what_is_under_way_is_applied_as_it_was_begun():
    def load(transport):
        state = Worker(transport, steps=4, delay=2).train(5).rounds.state_dict()
        worker = Worker(transport, steps=4, delay=2, keep=0.0)
        with pytest.raises(ConfigError, match=r"keep=0\.0, and the state has an exchange under way with another one"):
            worker.rounds.load_state_dict(state)

    on_all_ranks(load, 2)


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "steps=None, seconds=None"),
        ({"steps": 2, "seconds": 1.0}, "one of them"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"steps": 2, "fragments": 3}, "from the number of fragments on, 3"),
        ({"steps": 6, "fragments": 3, "delay": 2}, "0 to 1"),
        ({"steps": 6, "delay": -1}, "delay=-1"),
        ({"steps": 6, "delay": 1, "keep": 1.0}, "keep=1.0"),
        ({"steps": 6, "keep": 0.5}, "only with a delay"),
        ({"steps": 6, "delay": 1, "keep": "all"}, "keep='all'; allowed: 'moves', or a number from 0 to below 1"),
        ({"steps": 6, "delay": 1, "keep": 0.5, "memory": "residual"}, "in the parameter and in the memory, and count twice"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"seconds": 1.0, "fragments": 2}, "one fragment"),
        ({"seconds": 1.0, "delay": 1}, "no delay"),
        ({"steps": lambda number: 3, "fragments": 2}, "a single fragment"),
        ({"steps": lambda number: 0}, r"steps\(1\) is 0"),
        ({"steps": 2, "weights": "size"}, "weights='size'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        on_all_ranks(lambda t: Worker(t, **options), 1)


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf")])
def test_samples_that_make_no_sense_are_refused(samples):
    worker = on_all_ranks(lambda t: Worker(t, steps=2), 1)[0]
    with pytest.raises(ConfigError, match="samples"):
        worker.rounds.step(samples)
    assert worker.rounds.steps == 0


def test_an_exchange_under_way_fails_where_it_is_applied():
    def train(transport):
        worker = Worker(transport, steps=4, delay=2)
        worker.train(7)
        worker.rounds.fragments[0].step += transport.rank
        worker.train(2)
        with pytest.raises(ExchangeError, match="differ in step"):
            worker.train(1)
        worker.rounds.close()

    on_all_ranks(train, 2)


def test_one_rank_alone_makes_outer_steps():
    worker = on_all_ranks(lambda t: Worker(t, **DENSE, steps=2, outer="sgd:0.5"), 1)[0]
    start = worker.flat.copy()
    worker.move(0)
    worker.rounds.step()
    worker.move(1)
    end = worker.flat.copy()
    worker.rounds.step()
    np.testing.assert_allclose(worker.flat, (start + end) / 2, rtol=1e-5, atol=1e-6)

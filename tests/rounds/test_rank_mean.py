"""Means of what each rank has sent: what they are, that they bear a rank that lies, memories, and what does not fit."""

import copy
import itertools
import math
import threading
import tracemalloc

import numpy as np
import pytest
from support.in_process_ranks import on_all_ranks
from support.local_rounds import SHAPES, Worker

from grace_ext import ConfigError
from grace_ext.communicators.allgather import Allgather
from grace_ext.means import ClippedMean, Median, NearestNeighborMixing, SenderMean, TrimmedMean, WeightedMean
from grace_ext.rounds.fragment import Fragment
from grace_ext.rounds.rank_mean import RankMean, separated

RANKS, LIAR = 4, 1
DENSE = {"compression": "dense/raw", "memory": "none"}
BY_COORDINATE = [Median(), TrimmedMean(0.25), NearestNeighborMixing(Median(), 0.25)]
MEANS = [WeightedMean(), SenderMean(), ClippedMean(), *BY_COORDINATE]


def slow(mean, vectors, shares):
    """The formula of each mean, element by element and in float64."""
    if isinstance(mean, NearestNeighborMixing):
        kept = len(vectors) - math.ceil(mean.share * len(vectors))
        nearest = [sorted(vectors, key=lambda other: math.dist(other, one))[:kept] for one in vectors]
        return slow(mean.mean, [[sum(values) / kept for values in zip(*some, strict=True)] for some in nearest], shares)
    if isinstance(mean, ClippedMean):
        norms = [math.hypot(*vector) for vector in vectors]
        shares = [share * min(1, np.median(norms) / norm) for share, norm in zip(shares, norms, strict=True)]
    found = []
    for values in zip(*vectors, strict=True):
        ordered = sorted(values)
        if isinstance(mean, Median):
            found.append((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)
        elif isinstance(mean, TrimmedMean):
            inner = ordered[math.ceil(mean.share * len(ordered)) : len(ordered) - math.ceil(mean.share * len(ordered))]
            found.append(sum(inner) / len(inner))
        else:
            found.append(sum(share * value for share, value in zip(shares, values, strict=True)))
    return np.array(found)


def same(rows):
    assert all(row.tobytes() == rows[0].tobytes() for row in rows), "ranks hold different bits"


def moved(worker):
    return worker.shared - worker.flat


@pytest.mark.parametrize("mean", MEANS, ids=repr)
def test_each_mean_is_what_its_formula_says(mean):
    """Of a fragment as a whole, although small tensors are in a bucket of their own. Rank 3 has no data, and is not counted."""
    weighted = not mean.by_coordinate
    samples = (1, 3, 4, 0) if weighted else (1, 1, 1, 0)

    def train(transport):
        worker = Worker(transport, **DENSE, mean=mean, steps=1, weights="samples" if weighted else "uniform")
        for number in range(2):
            if transport.rank == 3 and not weighted:
                worker.arrays["a"][0, 0] = np.inf  # it has nothing to contribute
            else:
                worker.move(number)
            for array in worker.arrays.values():
                array *= np.float32(1 + transport.rank)
            shared, before = worker.shared.copy(), moved(worker)
            worker.rounds.step(samples=samples[transport.rank])
        return before, shared - worker.shared, worker.flat

    rows = on_all_ranks(train, RANKS)
    same([row[2] for row in rows])
    shares = [one / sum(samples) for one in samples[:3]]
    wanted = slow(mean, [row[0].astype(np.float64).tolist() for row in rows[:3]], shares)
    np.testing.assert_allclose(rows[0][1], wanted, rtol=1e-4, atol=2e-5)


def test_the_mean_over_senders_is_of_those_who_have_selected_an_element_and_of_all_where_all_is_sent():
    """Three tensors go by top-k; the bias, which is small, goes as it is, and counts although one rank has not moved it."""

    def train(transport):
        worker = Worker(transport, compression="topk:0.1/rice/raw", memory="none", mean=SenderMean(), steps=1)
        before = worker.arrays["bias"].copy()
        worker.move(0)
        if transport.rank == 2:
            worker.arrays["bias"][:] = before
        shared, sent = worker.shared.copy(), moved(worker)
        worker.rounds.step()
        return sent, shared - worker.shared, worker.flat

    rows = on_all_ranks(train, RANKS)
    same([row[2] for row in rows])
    size, bias = rows[0][0].size, slice(SHAPES["a"][0] * SHAPES["a"][1], SHAPES["a"][0] * SHAPES["a"][1] + SHAPES["bias"][0])
    total, count = np.zeros(size), np.zeros(size)
    for sent, _, _ in rows:
        is_bias = np.zeros(size, bool)
        is_bias[bias] = True
        magnitudes = np.where(is_bias, 0, np.abs(sent))
        selected = is_bias | (magnitudes >= np.sort(magnitudes)[-round(0.1 * (size - is_bias.sum()))])
        total, count = total + np.where(selected, sent, 0), count + selected
    assert {*range(4)} <= set(count[~is_bias].astype(int))
    np.testing.assert_allclose(rows[0][1], total / np.maximum(count, 1), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("spec", ["topk:0.1/rice/raw", "topk:0.1/rice/qsgd:2"])
def test_the_mean_over_senders_is_the_same_with_an_array_for_each_rank(spec, monkeypatch):
    """So it is taken when a rank is left out. Of the small values, two bits leave 0, which are sent all the same."""

    def train(transport):
        worker = Worker(transport, compression=spec, mean=SenderMean(), steps=1, weights="samples")
        for number in range(3):
            worker.move(number)
            worker.rounds.step(samples=(1, 3, 4, 2)[transport.rank])
        return worker.flat

    shorter = on_all_ranks(train, RANKS)
    monkeypatch.setattr(RankMean, "_take_of_senders", lambda *_: False)
    rows = on_all_ranks(train, RANKS)
    same(shorter)
    same(rows)
    np.testing.assert_allclose(rows[0], shorter[0], rtol=1e-5, atol=1e-6)


def test_the_mean_over_senders_needs_no_array_for_each_rank():
    size, most = 2**18, []

    def train(transport):
        start = {"a": np.zeros((512, 512), np.float32)}
        worker = Worker(transport, start=start, compression="topk:0.01/rice/raw", mean=SenderMean(), steps=1)
        (fragment,) = worker.rounds.fragments
        take = fragment._of_ranks.take

        def measured(shares, out):
            gate.wait()
            if transport.rank == 0:
                tracemalloc.start()
                found = take(shares, out)
                most.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            gate.wait()
            return found if transport.rank == 0 else take(shares, out)

        fragment._of_ranks.take = measured
        for number in range(2):
            worker.move(number)
            worker.rounds.step()

    gate = threading.Barrier(RANKS, timeout=600)
    on_all_ranks(train, RANKS)
    assert max(most) < 4 * size * 1.6, "the shares of all elements, and whether the result is finite"


LIES = {
    "nan": lambda change: np.full_like(change, np.nan),
    "long": lambda change: 1e6 * change,
    "flipped": lambda change: -change,
}


def lie(worker, change_of):
    """Make the worker's parameters such that its pseudo-gradient is another one, and say that it is finite."""
    for name, array in worker.arrays.items():
        shared = next(f.shared[name] for f in worker.rounds.fragments if name in f.shared).reshape(array.shape)
        array[:] = shared - change_of(shared - array).astype(np.float32)


class Lying(Fragment):
    """Says of itself that it is finite."""

    def measure(self) -> bool:
        super().measure()
        return True


@pytest.mark.parametrize(
    "mean, kind",
    # Mixing takes a lie that is as near as the honest ranks are to each other for one of them, and divides it among the others.
    [pair for pair in itertools.product(BY_COORDINATE, LIES) if pair[1] != "flipped" or pair[0] is not BY_COORDINATE[2]],
    ids=repr,
)
def test_a_rank_that_lies_moves_nothing_beyond_what_honest_ranks_have_sent(mean, kind, caplog):
    def train(transport):
        worker, ranges = Worker(transport, **DENSE, mean=mean, steps=1), []
        for number in range(3):
            worker.move(number)
            if transport.rank == LIAR:
                worker.rounds.fragments[0].__class__ = Lying
                lie(worker, LIES[kind])
            shared, before = worker.shared.copy(), moved(worker)
            worker.rounds.step()
            ranges.append((before, shared - worker.shared, worker.flat.copy()))
        return ranges

    rows = on_all_ranks(train, RANKS)
    for of_ranks in zip(*rows, strict=True):
        same([flat for _, _, flat in of_ranks])
        honest = np.array([before for rank, (before, _, _) in enumerate(of_ranks) if rank != LIAR])
        result = of_ranks[0][1]
        assert (result >= honest.min(0) - 1e-6).all() and (result <= honest.max(0) + 1e-6).all()
    assert ("what ranks [1] have sent is not finite" in caplog.text) == (kind == "nan")


def test_a_long_update_counts_as_one_of_median_length():
    def train(transport):
        worker = Worker(transport, mean=ClippedMean(), steps=1)  # top-k with a residual
        worker.move(0)
        if transport.rank == LIAR:
            lie(worker, LIES["long"])
        before = worker.shared.copy()
        worker.rounds.step()
        return before - worker.shared, worker.flat

    rows = on_all_ranks(train, RANKS)
    same([flat for _, flat in rows])
    honest = 0.01 * math.sqrt(rows[0][0].size)
    assert 0 < np.linalg.norm(rows[0][0]) < honest


@pytest.mark.parametrize("memory", ["ef21", "residual"])
def test_a_rank_that_is_left_out_keeps_its_memory(memory):
    """What overflows is not finite, although the parameters were: the others go on, and so does that rank in the next round."""
    mean = Median() if memory == "ef21" else ClippedMean()

    def train(transport):
        worker, kept = Worker(transport, rules={"*": "topk:0.2/rice/raw"}, memory=memory, mean=mean, steps=1), []
        for number in range(4):
            worker.move(number)
            if transport.rank == LIAR and number == 2:
                worker.rounds.fragments[0].__class__ = Lying
                lie(worker, LIES["nan"])
            worker.rounds.step()
            fields = worker.rounds.fragments[0].exchange.state_dict()
            kept.append(np.concatenate(list(fields["estimate" if memory == "ef21" else "residual"].values())))
        return kept, worker.flat

    rows = on_all_ranks(train, RANKS)
    same([flat for _, flat in rows])
    for rank, (kept, flat) in enumerate(rows):
        assert np.isfinite(flat).all() and np.isfinite(kept[3]).all()
        assert (kept[2].tobytes() == kept[1].tobytes()) == (rank == LIAR)
        assert kept[3].tobytes() != kept[2].tobytes()


def test_with_ef21_the_mean_is_that_of_what_ranks_have_sent_so_far():
    """A robust mean of sparse updates: of the estimates, which approach pseudo-gradients that stay the same."""
    goals = np.random.default_rng(5).standard_normal((RANKS, 6550)).astype(np.float32)
    goals[LIAR] *= 100

    def train(transport):
        worker = Worker(
            transport, rules={"*": "topk:0.2/rice/raw"}, memory="ef21", mean=Median(), outer="sgd:lr=1e-6", steps=1
        )
        for _ in range(12):
            start = 0
            for array in worker.arrays.values():
                array -= goals[transport.rank][start : start + array.size].reshape(array.shape)
                start += array.size
            before = worker.shared.copy()
            worker.rounds.step()
        return (before.astype(np.float64) - worker.shared) / 1e-6, worker.flat

    rows = on_all_ranks(train, RANKS)
    same([flat for _, flat in rows])
    wanted = np.median(goals, axis=0)
    assert np.linalg.norm(rows[0][0] - wanted) < 0.2 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "spec, memory, mean",
    [
        ("topk:0.2/rice/qsgd:7", "ef21", Median()),
        ("dense/qsgd:4", "residual", TrimmedMean(0.25)),
        ("topk:0.1/rice/raw", "residual", ClippedMean()),
    ],
)
def test_saved_ranks_go_on_bit_for_bit(spec, memory, mean):
    def train(transport):
        options = {"compression": spec, "memory": memory, "mean": mean, "outer": "nesterov", "steps": 2, "fragments": 2}
        worker = Worker(transport, **options)
        worker.train(5)
        saved = copy.deepcopy((worker.arrays, worker.rounds.state_dict()))
        worker.train(5, first=5)
        again = Worker(transport, **options)
        for name, array in saved[0].items():
            again.arrays[name][:] = array
        again.rounds.load_state_dict(saved[1])
        again.train(5, first=5)
        return worker.shared, again.shared, worker.flat, again.flat

    for shared, again, flat, its_flat in (rows := on_all_ranks(train, 3)):
        assert shared.tobytes() == again.tobytes() and flat.tobytes() == its_flat.tobytes()
    same([row[0] for row in rows])


def test_estimates_do_not_go_with_another_kind_of_mean():
    """Memory "ef21" keeps the plain mean of all ranks' estimates, which a robust mean does without."""

    def train(transport):
        made = [
            Worker(transport, rules={"*": "topk:0.2/rice/raw"}, memory="ef21", mean=mean, steps=1)
            for mean in (None, Median())
        ]
        for one, other in (made, made[::-1]):
            with pytest.raises(ConfigError, match="goes with another mean; allowed: `mean` given, or left out, as there"):
                one.rounds.load_state_dict(other.rounds.state_dict())
        return True

    assert on_all_ranks(train, 2) == [True, True]


def test_buffers_go_by_the_same_mean():
    def train(transport):
        rank = transport.rank
        worker = Worker(transport, **DENSE, mean=Median(), steps=1, buffers={"mean": np.full(3, rank, np.float32)})
        worker.train(1)
        first = worker.buffers["mean"].copy()
        worker.buffers["mean"][:] = 1e9 if rank == LIAR else rank
        worker.train(1, first=1)
        return first, worker.buffers["mean"]

    for first, second in on_all_ranks(train, RANKS):
        assert (first == 1.5).all() and (second == 2.5).all()


@pytest.mark.parametrize("claim", [math.nan, math.inf, -5.0])
def test_a_claim_that_is_no_number_of_samples_counts_for_nothing(claim):
    def train(transport):
        worker = Worker(transport, **DENSE, steps=1, weights="samples")
        worker.move(0)
        before = worker.flat.copy()
        worker.rounds._turns[0].samples = claim - 1 if transport.rank == LIAR else 0.0
        worker.rounds.step(samples=1.0)
        return before, worker.flat

    rows = on_all_ranks(train, 3)
    np.testing.assert_allclose(rows[0][1], (rows[0][0] + rows[2][0]) / 2, rtol=1e-5, atol=1e-6)


def test_ranks_with_different_means_are_refused():
    def train(transport):
        with pytest.raises(ConfigError, match="rank 0"):
            Worker(transport, **DENSE, mean=TrimmedMean(0.25 + 0.1 * transport.rank), steps=1)
        return True

    assert on_all_ranks(train, 2) == [True, True]


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(mean=mean, communicator=communicator), "sums before ranks have seen .* allowed with it: 'allgather'")
        for mean, communicator in itertools.product([ClippedMean(), Median()], ["sharded", "tree", "hierarchical"])
    ]
    + [
        ({"mean": Median()}, "is sent sparsely; allowed: a dense compression"),
        ({"mean": Median(), "weights": "samples", **DENSE}, "takes no weights; allowed: weights='uniform'"),
        ({"mean": ClippedMean(), "compression": "powersgd:4"}, "low-rank factors can only be summed"),
    ],
)
def test_what_a_mean_of_ranks_cannot_be_is_refused(options, said):
    def train(transport):
        with pytest.raises(ConfigError, match=said):
            Worker(transport, **options, steps=1)
        return True

    assert on_all_ranks(train, 2) == [True, True]


def test_buckets_that_are_summed_are_refused():
    def train(transport):
        worker = Worker(transport, **DENSE, steps=1)
        one = worker.rounds.fragments[0]
        with pytest.raises(ConfigError, match="goes by 'allgather', which sums; allowed: Separate"):
            Fragment(one.exchange, transport, one.outer, worker.parameters, one.states, "other", mean=Median())
        return True

    assert on_all_ranks(train, 2) == [True, True]
    assert separated(Allgather(), Median()).name == "separate"

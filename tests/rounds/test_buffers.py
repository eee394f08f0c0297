"""Buffers in rounds: those that are not finite, and means that are not the plain one."""

from unittest import mock

import numpy as np
import pytest
from support.in_process_ranks import on_all_ranks
from support.local_rounds import Worker

from grace_ext.means import ClippedMean, Median, SenderMean
from grace_ext.rounds.buffers import mean_of_rows

RANKS = 3
MEANS = [None, SenderMean(), ClippedMean(radius=100), Median()]
INF, NAN = np.float32(np.inf), np.float32(np.nan)


def with_buffers(transport, values, **options):
    return Worker(
        transport, buffers={"mean": np.array(values, np.float32)}, rules={"*": "dense/raw"}, memory="none", **options
    )


@pytest.mark.parametrize("mean", MEANS, ids=repr)
def test_a_mask_costs_no_round_and_stays(mean):
    def train(transport):
        worker = with_buffers(transport, [0, -INF, 5], steps=2, mean=mean)
        began = worker.flat.copy()
        worker.train(1)
        worker.buffers["mean"][2] = worker.rank
        worker.train(1, first=1)
        assert worker.flat.tobytes() == worker.shared.tobytes() != began.tobytes()
        return worker.buffers["mean"].tolist(), worker.rounds.stats()["lost_rounds"]

    assert on_all_ranks(train, RANKS) == [([0, -INF, 1], 0)] * RANKS


@pytest.mark.parametrize("fragments", [1, 2])
def test_buffers_of_a_round_that_is_lost_are_those_of_the_round_before(fragments):
    """Or a running mean that one bad batch has made infinite would cost all rounds that follow."""

    def train(transport):
        worker = with_buffers(transport, [1], steps=2, fragments=fragments, outer="sgd")
        worker.train(3)
        worker.buffers["mean"][:] = INF
        worker.train(1, first=3)
        lost, back = worker.rounds.stats()["lost_rounds"], worker.buffers["mean"].tolist()
        worker.train(2, first=4)
        worker.rounds.synchronize()
        return lost, back, worker.rounds.stats()["lost_rounds"], worker.flat.tobytes()

    rows = on_all_ranks(train, RANKS)
    assert [row[:3] for row in rows] == [(1, [1.0], 1)] * RANKS
    assert len({row[3] for row in rows}) == 1


def test_nothing_is_assigned_where_there_are_no_buffers():
    def lose_a_round(transport):
        worker = Worker(transport, steps=1)
        with mock.patch.object(worker.parameters, "assign_buffers", side_effect=AssertionError):
            worker.arrays["a"][0, 0] = NAN
            worker.rounds.step()
        return worker.rounds.stats()["lost_rounds"]

    assert on_all_ranks(lose_a_round, 2) == [1, 1]


@pytest.mark.parametrize("mean", MEANS, ids=repr)
def test_what_is_finite_on_all_ranks_for_the_first_time_is_shared_then(mean):
    """A counter of extremes begins with infinity."""

    def train(transport):
        worker, seen = with_buffers(transport, [INF], steps=1, mean=mean), []
        for finite_on in (1, RANKS, RANKS):
            if worker.rank < finite_on:
                worker.buffers["mean"][:] = worker.rank
            worker.train(1)
            seen.append(float(worker.buffers["mean"][0]))
        return seen

    assert on_all_ranks(train, RANKS) == [[0, 1, 1], [INF, 1, 1], [INF, 1, 1]]


def test_a_mean_that_clips_clips_what_buffers_have_moved_by():
    def train(transport):
        worker = with_buffers(transport, [100], steps=1, mean=ClippedMean(radius=0.5))
        worker.buffers["mean"] += [0.25, 0.5, 50][worker.rank]
        worker.train(1)
        return float(worker.buffers["mean"][0])

    assert on_all_ranks(train, RANKS) == [pytest.approx(100 + (0.25 + 0.5 + 0.5) / 3, rel=1e-6)] * RANKS


def test_the_shared_buffers_are_in_the_state():
    def train(transport):
        worker = with_buffers(transport, [1, INF], steps=2)
        worker.train(3)
        worker.buffers["mean"][:] = 7 + worker.rank
        state = worker.rounds.state_dict()
        again = with_buffers(transport, [0, 0], steps=2)
        again.rounds.load_state_dict(state)
        assert again.buffers["mean"].tolist() == [7 + worker.rank] * 2
        again.buffers["mean"][0] = NAN  # which costs this round: the shared one is finite
        again.rounds.step()
        return again.buffers["mean"].tolist(), again.rounds.stats()["lost_rounds"]

    assert on_all_ranks(train, 2) == [([1, INF], 1)] * 2


def test_rows_of_ranks_that_do_not_count_are_left_out():
    rows = np.array([[1, 2], [NAN, NAN]], np.float32)
    assert mean_of_rows(np.nan_to_num(rows), {0: 1.0, 1: 0.0}, np.zeros(2, np.float32), None).tolist() == [1, 2]
    unknown = mean_of_rows(rows, {0: 0.5, 1: 0.5}, np.array([NAN, 0], np.float32), None)
    assert np.isnan(unknown).tolist() == [True, True]

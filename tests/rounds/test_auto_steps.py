"""Numbers of local steps that follow the link."""

import math

import pytest
from support.in_process_ranks import on_all_ranks
from support.local_rounds import Worker

from grace_ext import ConfigError
from grace_ext.rounds import AutoSteps
from grace_ext.transport.base import TransportWrapper


def test_exchanges_take_their_share_of_the_time():
    auto = AutoSteps(share=0.1, least=10, most=500)
    assert auto(1) == 10
    found = []
    for _ in range(5):
        auto.observe(step_seconds=0.5, exchange_seconds=5.0)  # 5 / (5 + 90 · 0.5) is a tenth
        found.append(auto(1))
    assert found == [20, 40, 80, 90, 90]
    auto.observe(0.5, 0.01)
    assert auto(1) == 45
    for _ in range(3):
        auto.observe(0.5, 0.01)
    assert auto(1) == 10
    for _ in range(9):
        auto.observe(0.5, 1e6)
    assert auto(1) == 500
    for unknown in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)):
        auto.observe(*unknown)
        assert auto(1) == 500


class Slow(TransportWrapper):
    """A virtual clock, which collectives of buckets advance."""

    def __init__(self, transport):
        super().__init__(transport)
        self.now, self.seconds = 0.0, 18.0

    def start_collective(self, kind, name, array, *args):
        if ".bucket0" in name:  # with which the float32 bucket goes from the second round on
            self.now += self.seconds
        return super().start_collective(kind, name, array, *args)


def test_all_ranks_make_as_many_steps_as_the_slowest_link_and_rank_ask_for():
    def train(transport):
        slow, ends = Slow(transport), []
        if transport.rank == 1:
            slow.seconds = 36.0
        worker = Worker(slow, steps=AutoSteps(share=0.5, least=2, most=24), clock=lambda: slow.now)
        for number in range(70):
            worker.move(number)
            slow.now += 2.0 if transport.rank == 2 else 1.0
            if worker.rounds.step():
                ends.append(number + 1)
            if number == 33:
                slow.seconds = 2.0
        return ends, worker.rounds.state_dict()["auto_steps"]

    rows = on_all_ranks(train, 3)
    assert rows[0] == rows[1] == rows[2]
    ends, last = rows[0]
    lengths = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    # 36 s on the slowest link, 2 s for a step of the slowest rank, half of the time: 18 steps. What an exchange took is told in
    # the next one, so that there are two rounds of 2 first, and that exchanges have become shorter counts from the last one on.
    assert lengths == [2, 2, 4, 8, 16, 18, 18] and last == 9


def test_the_steps_are_saved():
    def train(transport):
        slow = Slow(transport)
        options = {"steps": AutoSteps(share=0.5, least=2, most=100), "clock": lambda: slow.now}
        worker = Worker(slow, **options)
        for number in range(8):
            slow.now += 1.0
            worker.train(1, first=number)
        state = worker.rounds.state_dict()
        again = Worker(slow, **options)
        assert again.rounds.state_dict()["auto_steps"] == 2
        again.rounds.load_state_dict(state)
        return state["auto_steps"], again.rounds.state_dict()["auto_steps"]

    assert on_all_ranks(train, 2) == [(8, 8), (8, 8)]


def test_what_makes_no_sense_is_refused():
    for share in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ConfigError, match="AutoSteps: share="):
            AutoSteps(share)
    for least, most in ((0, 5), (6, 5)):
        with pytest.raises(ConfigError, match=f"least={least}, most={most}; allowed"):
            AutoSteps(least=least, most=most)

    def train(transport):
        for options, said in (({"delay": 1}, "allowed: no delay"), ({"fragments": 2}, "allowed: a single fragment")):
            with pytest.raises(ConfigError, match=said):
                Worker(transport, steps=AutoSteps(), **options)
        with pytest.raises(ConfigError, match="rank 0"):
            Worker(transport, steps=AutoSteps(share=0.1 + 0.1 * transport.rank))
        return True

    assert on_all_ranks(train, 2) == [True, True]

"""What a rank saves, loads and settles with the others. Through PyTorch: tests/adapters/_torch/test_session.py."""

import numpy as np
import pytest
from support.exchanges import TENSORS, arrays_of, make, step
from support.in_process_ranks import RANKS, gradient, on_all_ranks

from grace_ext import ConfigError
from grace_ext.exchange.session import StateSession
from grace_ext.transport import InProcessGroup

ORDER = [tensor.name for tensor in TENSORS]


def nothing_gathered(transport, name, memory, to):
    return []


def trained(transport, steps=2):
    exchange = make(transport)
    for i in range(steps):
        step(exchange, gradient(10 * transport.rank + i))
    return exchange


def same(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_a_saved_state_goes_on_as_if_nothing_had_happened():
    def work(transport):
        exchange = trained(transport)
        saved = StateSession(None, nothing_gathered).save(exchange, ORDER)
        again, session = make(transport), StateSession(None, nothing_gathered)
        session.load(saved, again)
        assert not session.settled
        session.settle(again, "test")
        assert session.settled and again.step == exchange.step == 2 and same(arrays_of(exchange), arrays_of(again))

    on_all_ranks(work)


def test_a_state_may_wait_for_its_exchange():
    session = StateSession(None, nothing_gathered)
    saved = StateSession(None, nothing_gathered).save(make(InProcessGroup(1).transport(0)), ORDER)
    session.load(saved, None)
    assert session.waiting is saved and session.save(None, ORDER) is saved
    with pytest.raises(ConfigError, match="of version 9"):
        session.load({**saved, "version": 9}, None)


@pytest.mark.parametrize("on_resize", [None, "reset"])
def test_ranks_that_were_there_share_what_they_owe_with_new_ones(on_resize):
    def work(transport):
        exchange, session = trained(transport), StateSession(on_resize, nothing_gathered)
        owed = arrays_of(exchange)["residual:a"]
        saved = session.save(exchange, ORDER)
        fresh = make(transport)
        session.carry_over(saved, fresh)
        session.settle(fresh, "test")
        assert fresh.step == 2
        return owed, arrays_of(fresh).get("residual:a", np.zeros_like(owed))

    results = on_all_ranks(work)
    before, after = (sum(part.astype(float) for part in parts) for parts in zip(*results, strict=True))
    assert np.allclose(after, 0 if on_resize else before, rtol=0, atol=1e-5)


def test_a_rank_that_goes_back_has_its_own_memory_again():
    def work(transport):
        exchange, session = trained(transport, 1), StateSession(None, nothing_gathered)
        saved, before = session.save(exchange, ORDER), arrays_of(exchange)
        step(exchange, gradient(99))
        session.restore(saved, exchange)
        again = session.save(exchange, ORDER)["memories"][transport.rank]["residual"]
        assert exchange.step == 1 and np.array_equal(again["a"], before["residual:a"])

    on_all_ranks(work)


def test_consolidated_memories_are_out_of_date_after_a_step():
    def work(transport):
        def gather(transport, name, memory, to):
            found = transport.allgather(name, memory["residual"]["a"].view(np.uint8)).wait().view(np.float32)
            rows = found.reshape(transport.size, -1)
            return [{"residual": {"a": row}} for row in rows] if transport.rank == to else []

        exchange, session = trained(transport), StateSession(None, gather)
        session.consolidate(exchange, ORDER, "test", 0)
        there = set(session.save(exchange, ORDER)["memories"])
        session.begin_step()
        return there, set(session.save(exchange, ORDER)["memories"])

    for rank, (there, after) in enumerate(on_all_ranks(work)):
        assert there == (set(range(RANKS)) if rank == 0 else {rank}) and after == {rank}


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="on_resize='merge'"):
        StateSession("merge", nothing_gathered)
    exchange = make(InProcessGroup(1).transport(0))
    with pytest.raises(ConfigError, match="to=1; allowed: 0 to 0"):
        StateSession(None, nothing_gathered).consolidate(exchange, ORDER, "test", 1)

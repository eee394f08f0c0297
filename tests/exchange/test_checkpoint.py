"""What is taken from a checkpoint by as many ranks, by others, and where a part of it is missing."""

import numpy as np
import pytest
from support import memory_exchanges
from support.arrays import gauss
from support.exchanges import TENSORS, arrays_of, make, step
from support.in_process_ranks import RANKS, gradient, on_all_ranks

from grace_ext import ConfigError
from grace_ext.exchange import checkpoint
from grace_ext.exchange.buckets import Tensor
from grace_ext.transport import InProcessGroup

ORDER = [tensor.name for tensor in TENSORS]


def exchange_of(rank=0, ranks=2, memory="residual"):
    return make(InProcessGroup(ranks).transport(rank), memory=memory)


def residual(seed):
    return {"residual": {tensor.name: gauss(tensor.size, seed + number) for number, tensor in enumerate(TENSORS)}}


def saved(ranks=2, there=None, step=7):
    """By so many ranks; the memories of those that are there."""
    one, *others = (checkpoint.pack({"step": step, **residual(rank)}, rank, ranks, ORDER) for rank in there or range(ranks))
    for other in others:
        one["memories"].update(other["memories"])
    return one


def test_pack_keeps_the_step_apart_from_the_memory():
    packed = checkpoint.pack({"step": 3, "residual": {"a": 1}}, 1, 4, ["a"])
    assert packed == {"version": 1, "ranks": 4, "step": 3, "order": ["a"], "memories": {1: {"residual": {"a": 1}}}}


@pytest.mark.parametrize("on_resize", checkpoint.POLICIES)
def test_as_many_ranks_go_on_where_they_were(on_resize):
    for rank in range(2):
        loaded = checkpoint.choose(saved(), exchange_of(rank), on_resize)
        assert loaded.is_restored and not loaded.is_incomplete and loaded.state["step"] == 7
        assert np.array_equal(loaded.state["residual"]["a"], residual(rank)["residual"]["a"])


def test_a_checkpoint_without_a_state_starts_from_zero():
    loaded = checkpoint.choose(None, exchange_of(), None)
    assert loaded.state == {"step": 0} and not loaded.is_restored and loaded.is_incomplete


def test_a_rank_whose_memory_is_missing_keeps_the_step():
    loaded = checkpoint.choose(saved(there=[0]), exchange_of(1), None)
    assert (
        loaded.state == {"step": 7}
        and not loaded.is_restored
        and "no memory of rank 1 (only of ranks [0])" in loaded.message
    )


@pytest.mark.parametrize("on_resize", [None, "redistribute"])
def test_other_ranks_share_what_is_owed(on_resize):
    loaded = [checkpoint.choose(saved(3), exchange_of(rank), on_resize) for rank in range(2)]
    owed = sum(residual(rank)["residual"]["b"].astype(float) for rank in range(3))
    assert np.allclose(sum(one.state["residual"]["b"] for one in loaded), owed, rtol=0, atol=1e-5)
    assert all(one.is_restored and one.state["step"] == 7 for one in loaded)


def test_other_ranks_may_start_from_zero():
    loaded = checkpoint.choose(saved(3), exchange_of(), "reset")
    assert loaded.state == {"step": 7} and loaded.is_incomplete
    loaded = checkpoint.choose(saved(3, there=[0, 2]), exchange_of(), None)
    assert loaded.state == {"step": 7} and "those of ranks [0, 2] are there" in loaded.message
    with pytest.raises(ConfigError, match="needs the memories of all 3 ranks"):
        checkpoint.choose(saved(3, there=[0, 2]), exchange_of(), "redistribute")


def test_what_has_no_place_here_is_named():
    strange = saved()
    strange["memories"][0] = {"velocity": {"a": gauss(TENSORS[0].size)}, "residual": {"c": gauss(3)}}
    loaded = checkpoint.choose(strange, exchange_of(), None)
    assert (
        loaded.is_incomplete
        and "no memory here has velocity" in loaded.message
        and "no tensor here is named c" in loaded.message
    )


def test_versions_and_policies_that_are_not_known():
    with pytest.raises(ConfigError, match="of version 2; known: 1"):
        checkpoint.choose({**saved(), "version": 2}, exchange_of(), None)
    with pytest.raises(ConfigError, match="on_resize='drop'; allowed: None, 'reset', 'redistribute'"):
        checkpoint.check_policy("drop")


@pytest.mark.parametrize("memory, kept", [("residual", True), ("ef21", False)])
def test_ranks_of_which_some_have_loaded_their_memory(memory, kept, caplog):
    """What is owed counts by its sum, so the others may start from zero; estimates do not."""
    exchange = exchange_of(memory=memory)
    step_alone = {
        field: {tensor.name: gauss(tensor.size) for tensor in TENSORS} for field in exchange.buckets[0].memory.states
    }
    exchange.load_state_dict({"step": 7, **step_alone})
    warning = checkpoint.settle(exchange, np.array([True, False]), np.array([7, 0]))
    assert "1 of 2 ranks loaded their memory" in warning and caplog.messages == [warning]
    assert ("because this memory needs the states of all ranks" in warning) != kept
    assert bool(arrays_of(exchange)) and any(array.any() for array in arrays_of(exchange).values()) == kept or not kept
    assert kept or not any(array.any() for array in arrays_of(exchange).values())
    assert exchange.step == 7


def test_the_step_is_that_of_a_rank_that_has_loaded_its_memory():
    exchange = exchange_of()
    checkpoint.settle(exchange, np.array([False, True]), np.array([0, 7]))
    assert exchange.step == 7


def test_ranks_with_checkpoints_of_different_steps_are_told():
    with pytest.raises(ConfigError, match="checkpoints of different steps: \\[7, 8\\]"):
        checkpoint.settle(exchange_of(), np.array([True, True]), np.array([7, 8]))


def test_gathering_gives_what_redistributing_gives():
    def work(transport):
        exchange = make(transport)
        step(exchange, gradient(transport.rank))
        own = {field: value for field, value in exchange.state_dict().items() if field != "step"}
        return own, checkpoint.gather_and_redistribute(exchange, own, "test"), exchange

    results = on_all_ranks(work)
    expected = checkpoint.redistribute(results[0][2], [own for own, _, _ in results], RANKS)
    for _, state, _ in results:
        assert state.keys() == expected.keys() == {"residual"}
        for tensor in TENSORS:
            assert np.array_equal(state["residual"][tensor.name], expected["residual"][tensor.name])


def test_fewer_ranks_take_over_what_all_share_whatever_the_memory():
    """The learning rate that memory muon's residuals are in units of."""
    tensor = Tensor("w", 1600, 2, shape=(40, 40))
    exchange = memory_exchanges.make(InProcessGroup(1).transport(0), "muon", tensors=[tensor])
    out, _ = memory_exchanges.step(exchange, gauss(1600))
    exchange.buckets[0].memory.denominator(tensor, out.__getitem__, 0.25)
    kept = exchange.state_dict()
    assert checkpoint.redistribute(exchange, [kept, kept], 1)["rate"]["w"].tolist() == [0.25]

"""Vectors by name, changed in transactions."""

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.memory.states import States


def begun(states, value, name="w"):
    state, following = states.begin(name, 3)
    following[:] = value
    return state


def test_a_state_begins_as_zeros_and_changes_by_a_commit_only():
    states = States("residual")
    assert not begun(states, 5).any() and not states.current("w").any()
    states.commit()
    assert states.current("w").tolist() == [5, 5, 5]


def test_a_rollback_keeps_the_state():
    states = States("residual")
    begun(states, 5)
    states.commit()
    begun(states, 7)
    states.rollback()
    states.commit()  # nothing is begun
    assert states.current("w").tolist() == [5, 5, 5]


def test_a_commit_covers_the_names_that_were_begun():
    states = States("residual")
    begun(states, 1, "a"), begun(states, 2, "b")
    assert sorted(states.commit()) == ["a", "b"] and (states.current("a")[0], states.current("b")[0]) == (1, 2)
    begun(states, 3, "a")
    assert states.commit() == ["a"] and (states.current("a")[0], states.current("b")[0]) == (3, 2)


def test_a_part_can_be_scaled():
    states = States("residual")
    begun(states, 2)
    states.commit()
    for name in ("w", "of nobody"):
        states.scale(name, slice(1, None), np.float32(3))
    assert states.current("w").tolist() == [2, 6, 6]


def test_copies_are_copies_and_can_be_loaded():
    states, other = States("residual"), States("residual")
    begun(states, 4)
    states.commit()
    copies = states.copies()
    other.load(copies)
    copies["w"][:] = 9
    assert states.current("w").tolist() == other.get("w", 3).tolist() == [4, 4, 4]


def test_another_size_is_refused():
    states = States("residual")
    states.load({"w": np.zeros(5, np.float32)})
    assert states.find("of nobody", 3) is None
    with pytest.raises(ConfigError, match="residual of 'w' has 5 elements, the gradient 3"):
        states.begin("w", 3)


def test_taking_and_loading_without_copies():
    states = States("residual")
    begun(states, 5)
    states.commit()
    array = states.current("w")
    begun(states, 7)
    taken = states.take()
    assert taken["w"] is array and states.copies() == {} and states.commit() == []
    states.load(taken, copy=False)
    assert np.shares_memory(states.current("w"), array)
    states.load(taken)
    assert not np.shares_memory(states.current("w"), array) and states.current("w").tolist() == [5, 5, 5]


def test_a_lent_buffer_changes_places_with_the_state():
    states = States("residual")
    begun(states, 1)
    states.commit()
    before, lent = states.current("w"), np.zeros(3, np.float32)
    state, following = states.begin("w", 3, lent=lent)
    assert state is before and following is lent
    lent[:] = 2
    assert states.settle("w", keep=False) is lent and states.current("w") is before
    states.begin("w", 3, lent=lent)
    assert states.settle("w", keep=True) is before and states.current("w") is lent
    assert states.commit() == []
    other = np.zeros(3, np.float32)
    states.begin("w", 3, lent=other)
    states.rollback()
    assert states.begin("w", 3)[1] is not other, "a buffer that was lent for one step is not used in the next"

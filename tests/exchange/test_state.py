"""What an exchange remembers follows its tensors, and has their sizes."""

import numpy as np
import pytest
from support.arrays import gauss
from support.exchanges import TENSORS, arrays_of, make, step

from grace_ext import ConfigError
from grace_ext.transport import InProcessGroup


def exchange():
    return make(InProcessGroup(1).transport(0), spec="topk:0.01/rice/raw")


def test_a_state_goes_from_one_exchange_to_another():
    first, second = exchange(), exchange()
    step(first, gauss(5000))
    assert set(arrays_of(first)) == {"residual:a", "residual:b"}
    second.load_state_dict(first.state_dict())
    assert second.step == first.step == 1
    assert all(np.array_equal(arrays_of(second)[name], array) for name, array in arrays_of(first).items())


def test_a_state_is_a_copy():
    one = exchange()
    step(one, gauss(5000))
    before = arrays_of(one)["residual:a"].copy()
    arrays_of(one)["residual:a"][:] = 9
    assert np.array_equal(arrays_of(one)["residual:a"], before)


def test_tensors_without_a_state_start_from_zero_and_unknown_ones_are_left_out():
    one = exchange()
    one.load_state_dict({"residual": {"b": gauss(2000), "of nobody": gauss(3)}, "velocity": {"a": gauss(3000)}})
    assert set(arrays_of(one)) == {"residual:a", "residual:b"} and not arrays_of(one)["residual:a"].any()
    assert np.array_equal(arrays_of(one)["residual:b"], gauss(2000))


def test_a_state_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="residual of 'a' has 7 elements, the tensor 3000"):
        exchange().load_state_dict({"residual": {TENSORS[0].name: gauss(7)}})

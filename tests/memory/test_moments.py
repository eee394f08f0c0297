"""Moments that a memory keeps. What is computed with them is tested by test_onebit_adam.py."""

import numpy as np

from grace_ext.memory.arrays import NumpyArrays
from grace_ext.memory.moments import Moments, MomentStates


class Elsewhere(NumpyArrays):
    """Another kind of arrays, which are the negatives of what they stand for."""

    @staticmethod
    def to_host(array):
        return -array

    @staticmethod
    def from_host(array):
        return -array


def test_the_flat_form_is_what_it_was_made_of():
    flat = np.array([3, 2, 0.5, 1, 2, 3, 4], np.float32)
    moments = Moments(flat)
    assert (moments.steps, moments.updates, moments.floor) == (3, 2, 0.5)
    assert moments.first.tolist() == [1, 2] and moments.second.tolist() == [3, 4]
    assert moments.flatten().tolist() == flat.tolist() and moments.size == Moments.size_of(2) == flat.size


def test_moments_move_to_another_kind_of_arrays_and_are_changed_there():
    moments = Moments(np.array([1, 1, 0, 5, 6], np.float32)).at(Elsewhere)
    assert moments.arrays is Elsewhere and moments.first.tolist() == [-5]
    moments.first[:] = -7
    assert moments.flatten().tolist() == [1, 1, 0, 7, 6] and moments.at(NumpyArrays).first.tolist() == [7]


def test_states_are_loaded_as_moments_and_saved_flat():
    states, flat = MomentStates(), np.array([1, 1, 0, 5, 6], np.float32)
    states.load_state_dict({"w": flat})
    assert states.get("w", 5).second.tolist() == [6] and states.get("w", 7) is None
    assert states.state_dict()["w"].tolist() == flat.tolist()

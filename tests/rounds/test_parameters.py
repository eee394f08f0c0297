"""Parameters that are numpy arrays."""

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.rounds import ArrayParameters


def test_what_is_read_moved_and_assigned():
    weights, mean = np.arange(6, dtype=np.float32).reshape(2, 3), np.full(2, 4, np.float32)
    parameters = ArrayParameters({"w": weights}, {"mean": mean})
    [tensor] = parameters.tensors()
    assert (tensor.name, tensor.size, tensor.ndim, tensor.shape) == ("w", 6, 2, (2, 3))
    out = np.empty(6, np.float32)
    parameters.read("w", out)
    assert (out == np.arange(6)).all()
    parameters.moved("w", np.full(6, 6, np.float32), out)
    assert (out == 6 - np.arange(6)).all()
    parameters.assign("w", np.full(6, 8, np.float32), 0.25)
    assert (weights.ravel() == 0.25 * np.arange(6) + 6).all()
    parameters.assign("w", np.zeros(6, np.float32), 0.0)
    assert not weights.any()
    assert (parameters.read_buffers() == 4).all()
    parameters.assign_buffers(np.zeros(2, np.float32), 0.5)
    assert (mean == 2).all()


def test_without_keeping_anything_what_was_there_does_not_matter():
    array = np.full(3, np.nan, np.float32)
    ArrayParameters({"w": array}).assign("w", np.ones(3, np.float32), 0.0)
    assert (array == 1).all()


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((4, 4), np.float32)[:, ::2]])
def test_other_arrays_are_refused(array):
    with pytest.raises(ConfigError, match="contiguous float32"):
        ArrayParameters({"w": array})

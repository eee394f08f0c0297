"""Both moments of tensors, which some memories keep in the place of the optimizer."""

from typing import Any, Self

import numpy as np

from .._util.shared_states import SharedStates
from .arrays import Arrays, NumpyArrays

_HEAD = 3


class Moments:
    """A tensor's moments.

    Args:
        flat: float32[size_of(d)]: `steps`, `updates` and `floor`, then the first moment and the second one.
    """

    def __init__(self, flat: np.ndarray):
        #: Numbers of steps, and of those in which the variance was updated.
        self.steps, self.updates = int(flat[0]), int(flat[1])
        #: The least variance that a step divides by.
        self.floor = float(flat[2])
        #: The kind of arrays that the moments are in.
        self.arrays: Arrays = NumpyArrays
        self._both: Any = flat[_HEAD:]

    @staticmethod
    def size_of(d: int) -> int:
        """Return the number of elements of the flat form.

        Args:
            d: Number of elements of the tensor.

        Returns:
            The number.
        """
        return _HEAD + 2 * d

    @property
    def size(self) -> int:
        """The number of elements of the flat form."""
        return _HEAD + len(self._both)

    @property
    def first(self) -> Any:
        """The first moment, float32[d]; a view."""
        return self._both[: len(self._both) // 2]

    @property
    def second(self) -> Any:
        """The second moment, float32[d]; a view."""
        return self._both[len(self._both) // 2 :]

    def at(self, arrays: Arrays) -> Self:
        """Move the moments into another kind of arrays.

        Args:
            arrays: The kind.

        Returns:
            The moments, these.
        """
        if arrays is not self.arrays:
            self._both, self.arrays = arrays.from_host(self.arrays.to_host(self._both)), arrays
        return self

    def flatten(self) -> np.ndarray:
        """Copy to the flat form.

        Returns:
            See `flat` above.
        """
        head = np.array([self.steps, self.updates, self.floor], np.float32)
        return np.concatenate([head, self.arrays.to_host(self._both)])


class MomentStates(SharedStates):
    """Moments by tensor name."""

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._state = {name: Moments(flat) for name, flat in self._state.items()}

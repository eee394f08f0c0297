"""Vectors by tensor that are the same on all ranks, changed in transactions."""

from typing import Any

import numpy as np


class SharedStates:
    """Arrays by tensor name, the same on all ranks: those in force, and those of the next step.

    In place of an array, a subclass can have what has `size` and `flatten()`.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._next: dict[str, Any] = {}

    def get(self, name: str, size: int) -> Any:
        """Return the array in force.

        Args:
            name: Name of the tensor.
            size: The number of elements it must have.

        Returns:
            float32 of any shape, or None if there is none of that many elements.
        """
        found = self._state.get(name)
        return found if found is not None and found.size == size else None

    def put(self, name: str, array: Any) -> None:
        """Set the next array, which `commit` puts in force.

        Args:
            name: Name of the tensor.
            array: float32.
        """
        self._next[name] = array

    def commit(self) -> None:
        """Put the next arrays in force."""
        self._state.update(self._next)
        self._next.clear()

    def rollback(self) -> None:
        """Discard the next arrays."""
        self._next.clear()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copy the arrays.

        Returns:
            name -> float32[size].
        """
        return {name: array.flatten() for name, array in self._state.items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Replace the arrays, and discard the next ones.

        Args:
            state: name -> float32[size].
        """
        self._state = {name: np.array(array, np.float32) for name, array in state.items()}
        self._next.clear()

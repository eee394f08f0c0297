"""What a memory promises, and the fused road through it."""

import numpy as np

from ..errors import ConfigError
from ..registry import Stage


class NumpyArrays:
    """Where a memory keeps its state. An adapter for another device brings its own with the same three methods."""

    @staticmethod
    def zeros(size: int) -> np.ndarray:
        return np.zeros(size, np.float32)

    @staticmethod
    def to_host(array) -> np.ndarray:
        """A copy as numpy float32[size]."""
        return array.copy()

    @staticmethod
    def from_host(array: np.ndarray):
        return array


class Memory(Stage):
    """Error feedback: keeps, per rank and name, what the sent containers did not carry.

    The plain road is `compensate`, compress, `update`. The fused road, for exchanges that can fail or turn out to be
    non-finite on another rank, is a transaction: `begin` hands out the state and room for the next one, which `commit`
    puts in force for all names begun since the last commit, and `rollback` forgets.
    """

    kind = "memory"
    stateful = False

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        """gradient: float32[d] -> float32[d], what to compress. Never the gradient's own buffer if it differs."""
        return gradient

    def update(self, name: str, compensated: np.ndarray, transmitted: np.ndarray) -> None:
        """compensated: what was compressed; transmitted: what receivers decode. Both float32[d]."""

    def begin(self, name: str, size: int, arrays=NumpyArrays):
        """(state, room for the next state), both float32[size] of that kind of arrays, or None if nothing is kept."""
        return None

    def begin_rows(self, name: str, size: int, rows: np.ndarray, width: int):
        """The same for some rows of a table of `size` elements; what a step costs depends on their number only.

        rows: int64[r], ascending, each once -> two float32[r * width], or None. `commit` changes these rows. Raises
        ConfigError where a memory has no such thing.
        """
        if self.stateful:
            raise ConfigError(f"memory {self.name!r} keeps no state by rows: use residual, or none, for sparse gradients")
        return None

    def commit(self) -> None:
        """Put the next states of all begun names in force."""

    def rollback(self) -> None:
        """Keep the states as they were."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the state by name, as numpy float32[size]."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Replace the state."""

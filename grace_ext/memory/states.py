"""Vectors that a memory keeps by name, changed in transactions."""

import numpy as np

from ..errors import ConfigError


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


class States:
    """float32[d] a name, twice: the one in force and, while a step is under way, room for the next one."""

    def __init__(self, what: str):
        """what: what it is, for messages."""
        self._what = what
        self._state: dict = {}
        self._next: dict = {}
        self._arrays: dict = {}  # of the names in use: which kind of arrays their state is; others are numpy
        self._begun: set[str] = set()

    def find(self, name: str, size: int):
        """The state in force, or None. Raises ConfigError if it has another size."""
        state = self._state.get(name)
        if state is not None and len(state) != size:
            raise ConfigError(f"{self._what} of {name!r} has {len(state)} elements, the gradient {size}")
        return state

    def get(self, name: str, size: int, arrays=NumpyArrays):
        """The state in force; zeros at first."""
        state = self.find(name, size)
        if state is None or name not in self._arrays:
            self._state[name] = arrays.zeros(size) if state is None else arrays.from_host(state)
            self._arrays[name] = arrays
        return self._state[name]

    def held(self, name: str):
        """The state in force of a name that has one."""
        return self._state[name]

    def following(self, name: str):
        """The next one of a name that was begun."""
        return self._next[name]

    def put(self, name: str, state) -> None:
        """Replace the state in force."""
        self._state[name] = state

    def begin(self, name: str, size: int, arrays=NumpyArrays) -> tuple:
        """(the state in force, room for the next one), which `commit` puts in force."""
        state = self.get(name, size, arrays)
        if name not in self._next:
            self._next[name] = arrays.zeros(size)
        self._begun.add(name)
        return state, self._next[name]

    def commit(self) -> list:
        """Returns the new states of all names begun since the last commit or rollback."""
        names = list(self._begun)
        for name in names:
            self._state[name], self._next[name] = self._next[name], self._state[name]
        self._begun.clear()
        return [self._state[name] for name in names]

    def rollback(self) -> None:
        self._begun.clear()

    def copies(self) -> dict[str, np.ndarray]:
        """By name, as numpy float32[size]."""
        return {name: self._arrays.get(name, NumpyArrays).to_host(state) for name, state in self._state.items()}

    def load(self, states: dict[str, np.ndarray]) -> None:
        """Replace all; what is begun is forgotten."""
        self._state = {name: np.array(array, np.float32).reshape(-1) for name, array in states.items()}
        self._next.clear()
        self._arrays.clear()
        self._begun.clear()

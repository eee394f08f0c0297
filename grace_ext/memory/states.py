"""Vectors that a memory keeps by name, changed in transactions."""

from typing import Any

import numpy as np

from ..errors import ConfigError
from .arrays import Arrays, NumpyArrays


class States:
    """Vectors float32[d] by name, each twice: the state in force and, during a step, a buffer for the next one.

    Args:
        what: What the states are, for messages.
    """

    def __init__(self, what: str):
        self._what = what
        self._state: dict[str, Any] = {}
        self._next: dict[str, Any] = {}
        #: The kind of arrays of a state, for each name in use; other states are numpy arrays.
        self._arrays: dict[str, Arrays] = {}
        self._begun: set[str] = set()
        self._lent: set[str] = set()  # begun names whose buffer is a caller's

    def find(self, name: str, size: int) -> Any:
        """Return the state in force, if there is one.

        Args:
            name: Name of the state.
            size: The number of elements it must have.

        Returns:
            The state, or None.

        Raises:
            ConfigError: It has another size.
        """
        state = self._state.get(name)
        if state is not None and len(state) != size:
            raise ConfigError(f"{self._what} of {name!r} has {len(state)} elements, the gradient {size}")
        return state

    def get(self, name: str, size: int, arrays: Arrays = NumpyArrays) -> Any:
        """Return the state in force, which begins as zeros.

        Args:
            name: Name of the state.
            size: The number of elements it must have.
            arrays: The kind of arrays that it is kept in.

        Returns:
            The state.

        Raises:
            ConfigError: It has another size.
        """
        state = self.find(name, size)
        if state is None or name not in self._arrays:
            self._state[name] = arrays.zeros(size) if state is None else arrays.from_host(state)
            self._arrays[name] = arrays
        return self._state[name]

    def arrays_of(self, name: str) -> Arrays:
        """Return the kind of arrays that a state is kept in.

        Args:
            name: Name of the state.

        Returns:
            The kind.
        """
        return self._arrays.get(name, NumpyArrays)

    def current(self, name: str) -> Any:
        """Return the state in force of a name that has one.

        Args:
            name: Name of the state.

        Returns:
            The state.
        """
        return self._state[name]

    def upcoming(self, name: str) -> Any:
        """Return the next state of a name that was begun.

        Args:
            name: Name of the state.

        Returns:
            The next state.
        """
        return self._next[name]

    def put(self, name: str, state: Any) -> None:
        """Replace the state in force.

        Args:
            name: Name of the state.
            state: The new one, float32[d].
        """
        self._state[name] = state

    def drop(self, name: str) -> None:
        """Forget the state in force. The next one begins as zeros.

        Args:
            name: Name of the state, which is not begun.
        """
        self._state.pop(name, None)
        self._next.pop(name, None)

    def begin(self, name: str, size: int, arrays: Arrays = NumpyArrays, lent: np.ndarray | None = None) -> tuple[Any, Any]:
        """Begin a transaction for one name.

        Args:
            name: Name of the state.
            size: The number of elements it must have.
            arrays: The kind of arrays that it is kept in.
            lent: A caller's buffer for the next state, float32[size]; then `settle` has to be called. None for one of its own.

        Returns:
            The state in force, and a buffer for the next one, which `commit` puts in force.

        Raises:
            ConfigError: The state has another size.
        """
        state = self.get(name, size, arrays)
        if lent is not None:
            self._next[name] = lent
            self._lent.add(name)
        elif name not in self._next:
            self._next[name] = arrays.zeros(size)
        self._begun.add(name)
        return state, self._next[name]

    def settle(self, name: str, keep: bool) -> np.ndarray:
        """End the transaction of a name whose `begin` was lent a buffer, before `commit` or `rollback`.

        Args:
            name: Name of the state.
            keep: Whether the next state comes into force.

        Returns:
            float32[size] that is the caller's again: the state that was in force, if the next one stays in the buffer, or else
            the buffer.
        """
        self._begun.discard(name)
        self._lent.discard(name)
        following = self._next.pop(name)
        if keep:
            self._state[name], following = following, self._state[name]
        return following

    def scale(self, name: str, part: slice, factor: np.float32) -> None:
        """Multiply a part of the state in force, if there is one.

        Args:
            name: Name of the state.
            part: Which elements.
            factor: The factor.
        """
        if name in self._state:
            self._state[name][part] *= factor

    def commit(self) -> list[str]:
        """Put the next states of all begun names in force.

        Returns:
            All names begun since the last commit or rollback.
        """
        names = list(self._begun)
        for name in names:
            self._state[name], self._next[name] = self._next[name], self._state[name]
        self._begun.clear()
        return names

    def rollback(self) -> None:
        """Keep the states in force, and discard the next ones."""
        for name in self._lent:
            del self._next[name]
        self._lent.clear()
        self._begun.clear()

    def copies(self) -> dict[str, np.ndarray]:
        """Copy all states.

        Returns:
            name -> float32[size], a numpy array.
        """
        return {name: self.arrays_of(name).to_host(state) for name, state in self._state.items()}

    def take(self) -> dict[str, np.ndarray]:
        """Remove all states, and discard what is begun.

        Returns:
            name -> float32[size], which are the caller's from now on.
        """
        found = {
            name: state if self.arrays_of(name) is NumpyArrays else self.arrays_of(name).to_host(state)
            for name, state in self._state.items()
        }
        self.load({})
        return found

    def load(self, states: dict[str, np.ndarray], copy: bool = True) -> None:
        """Replace all states. What is begun is discarded.

        Args:
            states: name -> float32[size].
            copy: Whether they stay the caller's.
        """
        made = np.array if copy else np.asarray
        self._state = {name: made(array, np.float32).reshape(-1) for name, array in states.items()}
        self._next.clear()
        self._arrays.clear()
        self._lent.clear()
        self._begun.clear()

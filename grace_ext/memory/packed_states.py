"""Vectors that a memory keeps by name in 8 or 16 bits an element."""

import collections
import dataclasses
from typing import Any

import numpy as np

from ..errors import ConfigError
from .arrays import Arrays, NumpyArrays
from .packed_vector import PackedVector
from .states import States

_NOTHING = np.empty(0, np.float32)
#: The bits of an element that states can be kept in, float32 included.
BITS = (8, 16, 32)


def make_states(what: str, bits: int) -> States:
    """Make states that are kept in some number of bits.

    Args:
        what: What the states are, for messages.
        bits: One of BITS.

    Returns:
        The states.

    Raises:
        ConfigError: Another number of bits.
    """
    if bits not in BITS:
        raise ConfigError(f"bits={bits} for the {what}; allowed: {', '.join(map(str, BITS))}")
    return States(what) if bits == 32 else PackedStates(what, bits)


class PackedStates(States):
    """States that are float32 only while a step works on them; see PackedVector for how they are kept.

    What is too small to be kept is kept on average, and a state stays the same when it is unpacked and packed again. The next
    state is packed as soon as `seal` is called, at the latest by `commit`. Numpy arrays of `begin` then go to the next name that
    is begun, so they must not be used any more. In a lent buffer, the next state waits for `settle`, which packs it in the place
    of the one in force; then the state in force is not unpacked as a whole.

    Args:
        what: What the states are, for messages.
        bits: 8 or 16.

    Source:
        A residual in 8 bits: Xie et al., LoCo: low-bit communication adaptor for large-scale model training, 2024, section 3,
        with a scale for a whole tensor, and steps in which it is set to zero. Rounding at random: Gupta et al., Deep learning
        with limited numerical precision, ICML 2015, section 3.
    """

    def __init__(self, what: str, bits: int):
        super().__init__(what)
        self._bits = bits
        self._working: dict[str, _Working] = {}
        self._free: collections.deque[np.ndarray] = collections.deque()

    def find(self, name: str, size: int) -> Any:
        """See States.find; the state is a copy."""
        return None if super().find(name, size) is None else self.current(name)

    def get(self, name: str, size: int, arrays: Arrays = NumpyArrays) -> Any:
        """See States.get; the state is a copy."""
        self._place(name, size, arrays)
        state = self.find(name, size)
        return arrays.zeros(size) if state is None else state

    def current(self, name: str) -> Any:
        """See States.current; the state is a copy."""
        packed = self._state[name]
        return packed.unpacked(packed.empty(len(packed)))

    def upcoming(self, name: str) -> Any:
        return self._working[name].following

    def put(self, name: str, state: np.ndarray) -> None:
        self._state[name] = PackedVector(state.size, self._bits).filled(state)
        self._arrays[name] = NumpyArrays
        self._next.pop(name, None)

    def _place(self, name: str, size: int, arrays: Arrays) -> Any:
        """Let a name's state be kept in arrays of that kind from now on, and return it, or None if there is none."""
        packed = super().find(name, size)
        former = self._arrays.get(name, arrays)
        if former is not arrays:
            self._next.pop(name, None)
        if packed is not None and former is not arrays:
            state = arrays.from_host(former.to_host(self.current(name)))
            packed = self._state[name] = arrays.packed(size, self._bits).filled(state)
        self._arrays[name] = arrays
        return packed

    def begin(self, name: str, size: int, arrays: Arrays = NumpyArrays, lent: np.ndarray | None = None) -> tuple[Any, Any]:
        """See States.begin; the state is a copy. With a lent buffer it is a PackedVector, which the caller adds to the gradient."""
        packed = self._place(name, size, arrays)
        self._give_back(name)
        self._begun.add(name)
        if lent is not None:
            if packed is None:
                packed = self._state[name] = self._make(name, size)
            self._working[name] = _Working(_NOTHING, lent, True)
            return packed, lent
        state, following = self._borrow(name, size), self._borrow(name, size)
        self._working[name] = _Working(state, following, False)
        if packed is None:
            state[:] = 0
        else:
            packed.unpacked(state)
        return state, following

    def begin_packed(self, name: str, size: int, arrays: Arrays) -> tuple[PackedVector, PackedVector]:
        """Begin a transaction for one name whose caller works on packed vectors.

        Args:
            name: Name of the state.
            size: The number of elements it must have.
            arrays: The kind of arrays that the states are kept in.

        Returns:
            The state in force, which stays as it is, and one that the caller fills, which `commit` puts in force.

        Raises:
            ConfigError: The state has another size.
        """
        if self._place(name, size, arrays) is None:
            self._state[name] = self._make(name, size)
        self._give_back(name)
        if name not in self._next or len(self._next[name]) != size:
            self._next[name] = self._make(name, size)
        self._begun.add(name)
        return self._state[name], self._next[name]

    def _make(self, name: str, size: int) -> Any:
        return self._arrays[name].packed(size, self._bits)

    def seal(self, name: str) -> None:
        """Pack the next state of a name, to which nothing more will be written. Nothing happens if it was not begun.

        Args:
            name: Name of the state.
        """
        working = self._working.get(name)
        if working is None or working.is_lent:  # there, the next state waits for `settle`
            return
        following = working.following
        if name not in self._next or len(self._next[name]) != len(following):
            self._next[name] = self._make(name, len(following))
        self._next[name].filled(following)
        self._give_back(name)

    def settle(self, name: str, keep: bool) -> np.ndarray:
        following = self._working[name].following
        self._give_back(name)
        self._begun.discard(name)
        if keep:
            if name not in self._state:
                self._state[name] = self._make(name, len(following))
            self._state[name].filled(following)
        return following

    def scale(self, name: str, part: slice, factor: np.float32) -> None:
        packed = self._state.get(name)
        if packed is not None:
            packed.scale(part, factor)

    def commit(self) -> list[str]:
        for name in list(self._working):
            self.seal(name)
        for name in self._begun - self._state.keys():
            self._state[name] = self._make(name, len(self._next[name]))
        return super().commit()

    def rollback(self) -> None:
        super().rollback()
        for name in list(self._working):
            self._give_back(name)

    def copies(self) -> dict[str, np.ndarray]:
        return {name: self._arrays[name].to_host(self.current(name)) for name in self._state}

    def take(self) -> dict[str, np.ndarray]:
        found = self.copies()
        self.load({})
        return found

    def load(self, states: dict[str, np.ndarray], copy: bool = True) -> None:
        super().load(states, copy=False)  # packed at once
        for name, state in self._state.items():
            self.put(name, state)
        self.rollback()

    def _borrow(self, name: str, size: int) -> Any:
        """An array of the name's kind, float32[size], of any content."""
        if self._arrays[name] is not NumpyArrays:
            return self._arrays[name].empty(size)
        array = self._free.pop() if self._free else np.empty(0, np.float32)
        return (array if array.size >= size else np.empty(size, np.float32))[:size]

    def _keep(self, array: Any) -> None:
        """Keep a numpy array for the next name. Devices' own allocators do so with others."""
        if isinstance(array, np.ndarray) and array.size:
            self._free.append(array if array.base is None else array.base)

    def _give_back(self, name: str) -> None:
        working = self._working.pop(name, None)
        if working is not None:
            self._keep(working.state)
            if not working.is_lent:
                self._keep(working.following)


@dataclasses.dataclass
class _Working:
    """The float32 arrays of a name: the state in force and the next one, which is a caller's if it is lent."""

    state: Any
    following: Any
    is_lent: bool

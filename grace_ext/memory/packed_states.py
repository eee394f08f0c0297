"""Vectors that a memory keeps by name in 8 or 16 bits an element."""

import collections
import dataclasses
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..kernels.half import bf16_decode
from ..kernels.packed import BLOCK, pack8, pack16, unpack8
from .states import Arrays, NumpyArrays, States

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
    """States that are float32 only while a step works on them.

    With 16 bits they are bfloat16; with 8, integers with a power of two for each block of 128 elements. Both are rounded at
    random to one of both neighbors, so that what is too small to be kept is kept on average, and both stay the same when they
    are unpacked and packed again. The next state is packed as soon as `seal` is called, at the latest by `commit`. The float32
    arrays of `begin` then go to the next name that is begun, so they must not be used any more. In a lent buffer, the next state
    waits for `settle`, which packs it in the place of the one in force.

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

    def find(self, name: str, size: int) -> np.ndarray | None:
        """See States.find; the state is a copy."""
        state = super().find(name, size)
        return None if state is None else state.unpacked(np.empty(size, np.float32))

    def get(self, name: str, size: int, arrays: Arrays = NumpyArrays) -> np.ndarray:
        """See States.get; the state is a copy."""
        state = self.find(name, size)
        return np.zeros(size, np.float32) if state is None else state

    def current(self, name: str) -> np.ndarray:
        """See States.current; the state is a copy."""
        return self._state[name].unpacked(np.empty(len(self._state[name]), np.float32))

    def upcoming(self, name: str) -> np.ndarray:
        return self._working[name].following

    def put(self, name: str, state: Any) -> None:
        self._state[name] = _Packed(state.size, self._bits).filled(state)

    def begin(
        self, name: str, size: int, arrays: Arrays = NumpyArrays, lent: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        packed = super().find(name, size)
        self._give_back(name)
        state, following = self._borrow(size), self._borrow(size) if lent is None else lent
        self._working[name] = _Working(state, following, lent is not None)
        if packed is None:
            state[:] = 0
        else:
            packed.unpacked(state)
        self._begun.add(name)
        return state, following

    def seal(self, name: str) -> None:
        """Pack the next state of a name, to which nothing more will be written. Nothing happens if it was not begun.

        Args:
            name: Name of the state.
        """
        working = self._working.get(name)
        if working is None:
            return
        if working.is_lent:  # the next state waits there for `settle`
            self._free.append(_whole(working.state))
            working.state = np.empty(0, np.float32)
            return
        following = working.following
        if name not in self._next or len(self._next[name]) != following.size:
            self._next[name] = _Packed(following.size, self._bits)
        self._next[name].filled(following)
        self._give_back(name)

    def settle(self, name: str, keep: bool) -> np.ndarray:
        following = self._working[name].following
        self._give_back(name)
        self._begun.discard(name)
        if keep:
            if name not in self._state:
                self._state[name] = _Packed(following.size, self._bits)
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
            self._state[name] = _Packed(len(self._next[name]), self._bits)
        return super().commit()

    def rollback(self) -> None:
        super().rollback()
        for name in list(self._working):
            self._give_back(name)

    def copies(self) -> dict[str, np.ndarray]:
        return {name: self.current(name) for name in self._state}

    def take(self) -> dict[str, np.ndarray]:
        found = self.copies()
        self.load({})
        return found

    def load(self, states: dict[str, np.ndarray], copy: bool = True) -> None:
        super().load(states, copy=False)  # packed at once
        for name, state in self._state.items():
            self.put(name, state)
        self.rollback()

    def _borrow(self, size: int) -> np.ndarray:
        array = self._free.pop() if self._free else np.empty(0, np.float32)
        return (array if array.size >= size else np.empty(size, np.float32))[:size]

    def _give_back(self, name: str) -> None:
        working = self._working.pop(name, None)
        if working is not None:
            own = [working.state] if working.is_lent else [working.state, working.following]
            self._free.extend(_whole(array) for array in own if array.size)


@dataclasses.dataclass
class _Working:
    """The float32 arrays of a name: the state in force and the next one, which is a caller's if it is lent."""

    state: np.ndarray
    following: np.ndarray
    is_lent: bool


def _whole(array: np.ndarray) -> np.ndarray:
    """The array that this one is the beginning of."""
    return array if array.base is None else array.base


class _Packed:
    """A vector float32[size] in 8 or 16 bits an element."""

    def __init__(self, size: int, bits: int):
        self._codes = np.zeros(size, np.int8 if bits == 8 else np.uint16)
        self._scales = np.zeros(-(-size // BLOCK), np.float32) if bits == 8 else None

    def __len__(self) -> int:
        return self._codes.size

    def unpacked(self, out: np.ndarray, start: int = 0) -> np.ndarray:
        """Write the elements from `start` on to out, float32[n], and return it. start: a multiple of BLOCK."""
        codes = self._codes[start : start + out.size]
        if self._scales is None:
            bf16_decode(codes, out)
        else:
            unpack8(codes, self._scales[start // BLOCK :][: -(-out.size // BLOCK)], out)
        return out

    def filled(self, values: np.ndarray, start: int = 0) -> "_Packed":
        """Pack float32[n] in the place of the elements from `start` on. start: as above; n: to the end, or a multiple, too."""
        codes = self._codes[start : start + values.size]
        if self._scales is None:
            pack16(values, codes)
        else:
            pack8(values, codes, self._scales[start // BLOCK :][: -(-values.size // BLOCK)])
        return self

    def scale(self, part: slice, factor: np.float32) -> None:
        """Multiply the elements of a part by a factor. Others of the same blocks may be rounded once more."""
        start, stop, _ = part.indices(len(self))
        first = start // BLOCK * BLOCK
        values = self.unpacked(np.empty(min(-(-stop // BLOCK) * BLOCK, len(self)) - first, np.float32), first)
        values[start - first : stop - first] *= factor
        self.filled(values, first)

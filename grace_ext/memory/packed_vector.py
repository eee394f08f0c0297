"""A vector in 8 or 16 bits an element."""

from typing import Any, Self

import numpy as np

from .._util.numerics import non_finite_allowed
from ..kernels.half import bf16_decode
from ..kernels.packed import BLOCK, pack8, pack16, unpack8

_PIECE = 256 * BLOCK  # elements that are unpacked at once where the whole is not needed


class PackedVector:
    """A vector float32[size] in 8 or 16 bits an element, as numpy arrays. Adapters for other devices have classes of their own.

    With 16 bits it is bfloat16; with 8, integers with a power of two for each block of 128 elements. Both are rounded at random,
    by numbers that depend on the value and its position only, so that all devices keep the same.

    Args:
        size: Number of elements, all of them zeros.
        bits: 8 or 16.
    """

    def __init__(self, size: int, bits: int):
        self._codes, self._scales = self._zeros(size, "int8" if bits == 8 else "int16"), None
        if bits == 8:
            self._scales = self._zeros(-(-size // BLOCK), "float32")

    def __len__(self) -> int:
        return len(self._codes)

    def empty(self, size: int) -> Any:
        """Make an array of this kind.

        Args:
            size: Number of elements.

        Returns:
            float32[size], of any content.
        """
        return np.empty(size, np.float32)

    def _zeros(self, size: int, dtype: str) -> Any:
        return np.zeros(size, dtype)

    def _unpack(self, codes: Any, scales: Any | None, out: Any) -> None:
        if scales is None:
            bf16_decode(codes.view(np.uint16), out)
        else:
            unpack8(codes, scales, out)

    def _pack(self, values: Any, codes: Any, scales: Any | None) -> None:
        if scales is None:
            pack16(values, codes.view(np.uint16))
        else:
            pack8(values, codes, scales)

    def _part(self, start: int, size: int) -> tuple[Any, Any | None]:
        """The codes of some elements and the scales of their blocks."""
        scales = None if self._scales is None else self._scales[start // BLOCK :][: -(-size // BLOCK)]
        return self._codes[start : start + size], scales

    def unpacked(self, out: Any, start: int = 0) -> Any:
        """Write some elements.

        Args:
            out: Output, an array of this kind, float32[n].
            start: Where they begin, a multiple of 128.

        Returns:
            `out`.
        """
        self._unpack(*self._part(start, len(out)), out)
        return out

    def add_to(self, out: Any) -> None:
        """Add all elements to an array, a piece at a time.

        Args:
            out: An array of this kind, float32[size], changed.
        """
        room = self.empty(min(_PIECE, len(out)))
        with non_finite_allowed():
            for start in range(0, len(out), _PIECE):
                part = out[start : start + _PIECE]
                part += self.unpacked(room[: len(part)], start)

    def filled(self, values: Any, start: int = 0) -> Self:
        """Pack values in the place of some elements.

        Args:
            values: An array of this kind, float32[n]; n is a multiple of 128 unless it reaches to the end.
            start: Where they begin, a multiple of 128.

        Returns:
            This vector.
        """
        self._pack(values, *self._part(start, len(values)))
        return self

    def scale(self, part: slice, factor: np.float32) -> None:
        """Multiply the elements of a part by a factor. Others of the same blocks may be rounded once more.

        Args:
            part: The part.
            factor: The factor.
        """
        start, stop, _ = part.indices(len(self))
        first = start // BLOCK * BLOCK
        values = self.unpacked(self.empty(min(-(-stop // BLOCK) * BLOCK, len(self)) - first), first)
        values[start - first : stop - first] *= float(factor)
        self.filled(values, first)

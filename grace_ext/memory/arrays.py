"""The kinds of arrays that memories keep their states in."""

import contextlib
import math
import mmap
from typing import Any, Protocol

import numpy as np

from ..kernels.momentum import accumulate_momentum
from ..pipeline.decoder import decode_add
from .packed_vector import PackedVector

_BLOCK = 2**16  # elements that are converted to float64 at once
_MAPPED = 2**20  # bytes from which on an array is memory of its own


class Arrays(Protocol):
    """A kind of arrays that a memory can keep its states in. Adapters for other devices have classes of their own."""

    def zeros(self, size: int) -> Any:
        """Make an array of zeros.

        Args:
            size: Number of elements.

        Returns:
            An array of this kind, float32[size].
        """

    def empty(self, size: int) -> Any:
        """Make an array of any content.

        Args:
            size: Number of elements.

        Returns:
            An array of this kind, float32[size].
        """

    def packed(self, size: int, bits: int) -> Any:
        """Make a vector of zeros in fewer bits.

        Args:
            size: Number of elements.
            bits: 8 or 16.

        Returns:
            A grace_ext.memory.packed_vector.PackedVector of this kind.
        """

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to a numpy array.

        Args:
            array: An array of this kind.

        Returns:
            A numpy array, float32[size].
        """
        raise NotImplementedError

    def from_host(self, array: np.ndarray) -> Any:
        """Make an array of this kind from a numpy array.

        Args:
            array: Of any dtype: states, and positions in them.

        Returns:
            An array of this kind; for numpy, the same one.
        """

    def to_sign(self, array: Any) -> None:
        """Replace each element by its sign, -1, 0 or 1.

        Args:
            array: An array of this kind, float32[size], changed.
        """

    def add_container(self, blob: np.ndarray, array: Any) -> None:
        """Add what a finite container holds to an array.

        Args:
            blob: The container, uint8[m].
            array: An array of this kind, float32[size], changed.
        """

    def clipping(self, array: Any, largest: float) -> Any:
        """Compute the factor that limits the L2 norm of an array, which is summed in float64.

        Args:
            array: An array of this kind, float32[size].
            largest: The largest L2 norm allowed.

        Returns:
            The factor in float64, at most 1; 0 if the array holds an Inf. A number, or an array of this kind without dimensions.
        """

    def clip(self, array: Any, deviations: float) -> None:
        """Limit the magnitudes of an array to a multiple of its standard deviation, which is computed in float64.

        Args:
            array: An array of this kind, float32[size], changed.
            deviations: The multiple.
        """

    def accumulate(self, average: Any, values: Any, momentum: float, share: float) -> None:
        """Let a moving average go on: average = momentum * average + share * values.

        Args:
            average: An array of this kind, float32[size], changed.
            values: The same, not changed.
            momentum: Factor of the average.
            share: Factor of the values.
        """

    def to_root(self, array: Any, least: float) -> None:
        """Replace each element by its square root.

        Args:
            array: An array of this kind, float32[size], changed.
            least: Elements count as at least this.
        """

    def total(self, array: Any) -> float:
        """Compute the sum of an array, in float64.

        Args:
            array: An array of this kind, float32[size].

        Returns:
            The sum.
        """
        raise NotImplementedError

    def normalized(self, matrix: Any, least: float) -> Any:
        """Divide a matrix by its Frobenius norm.

        Args:
            matrix: An array of this kind, float32[n, m].
            least: What it is divided by instead if the norm is smaller.

        Returns:
            An array of this kind, float32[n, m].
        """


class NumpyArrays(Arrays):
    """numpy's arrays."""

    @staticmethod
    def zeros(size: int) -> np.ndarray:
        if 4 * size < _MAPPED:
            return np.zeros(size, np.float32)
        # Of the thread's heap, memory would not go back to the system, and only that thread could use it again.
        mapped = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages; numpy asks for them, too
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, np.float32)

    @staticmethod
    def empty(size: int) -> np.ndarray:
        return np.empty(size, np.float32)

    @staticmethod
    def packed(size: int, bits: int) -> PackedVector:
        return PackedVector(size, bits)

    @staticmethod
    def to_host(array: np.ndarray) -> np.ndarray:
        return array.copy()

    @staticmethod
    def from_host(array: np.ndarray) -> np.ndarray:
        return array

    @staticmethod
    def to_sign(array: np.ndarray) -> None:
        np.sign(array, out=array)

    @staticmethod
    def add_container(blob: np.ndarray, array: np.ndarray) -> None:
        decode_add(blob, array)

    @staticmethod
    def clipping(array: np.ndarray, largest: float) -> float:
        blocks = (array[start : start + _BLOCK].astype(np.float64) for start in range(0, array.size, _BLOCK))
        norm = math.sqrt(sum(float(block @ block) for block in blocks))
        return largest / norm if norm > largest else 1.0

    @staticmethod
    def clip(array: np.ndarray, deviations: float) -> None:
        limit = np.float32(deviations * array.std(dtype=np.float64)) if array.size else np.float32(0)
        np.clip(array, -limit, limit, out=array)

    @staticmethod
    def accumulate(average: np.ndarray, values: np.ndarray, momentum: float, share: float) -> None:
        accumulate_momentum(average, values, np.float32(momentum), np.float32(share), average)

    @staticmethod
    def to_root(array: np.ndarray, least: float) -> None:
        np.sqrt(np.maximum(array, np.float32(least), out=array), out=array)

    @staticmethod
    def total(array: np.ndarray) -> float:
        return float(array.sum(dtype=np.float64))

    @staticmethod
    def normalized(matrix: np.ndarray, least: float) -> np.ndarray:
        return matrix / max(np.linalg.norm(matrix), np.float32(least))

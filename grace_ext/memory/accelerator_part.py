"""What a memory with hooks has to do where gradients are on an accelerator."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..pipeline.compressor import Compressor
from .arrays import Arrays
from .packed_vector import PackedVector


class AcceleratorPart:
    """The part of a memory's interface that takes the place of some of its hooks on an accelerator; the hooks are in Memory.

    Memories without hooks, and those that need the whole gradient on the host, keep what is here.
    """

    receives_at_positions = False  #: Whether `on_received_at` does anything, where the memory `works_at_positions`.
    keeps_rounded = (
        False  #: Whether its only state is a residual whose elements are kept by themselves in less than 32 bits.
    )
    receives_anywhere = False  #: Whether `on_received_anywhere` does anything, where the memory `works_at_positions`.

    def works_at_positions(self, compressor: Compressor) -> bool:
        """Say whether the hooks get along without the result as an array, so that gradients can be on an accelerator.

        Args:
            compressor: The bucket's compressor, before a schedule changes it.

        Returns:
            Whether sketches, `correct_at`, and `on_received_at` or `on_received_anywhere` do in place of `correct_gradient` and
            `on_received`.
        """
        return False

    def begin_rounded(self, name: str, size: int, arrays: Arrays) -> tuple[PackedVector, PackedVector]:
        """Begin a transaction for one name, as `begin` does, without unpacking. Only if it `keeps_rounded`.

        Args:
            name: Name of the bucket.
            size: Number of its elements.
            arrays: The kind of arrays that the states are kept in.

        Returns:
            The residual and the next one, which the caller fills: what is rounded as PackedVector.filled does it.
        """
        raise NotImplementedError

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        """Make what is encoded of a gradient, where it lies. Only if `works_at_positions`.

        Args:
            name: Name of the bucket.
            gradient: An array of that kind, float32[d], changed.
            sizes: Numbers of elements of the bucket's tensors.
            ranks: Number of ranks.
            arrays: The kind.
        """

    def on_received_at(self, name: str, at: np.ndarray, values: np.ndarray, scale: float) -> float:
        """See the elements of a result that are not zero. Only if `receives_at_positions`.

        Args:
            name: Name of the bucket.
            at: Positions, uint32[n], ascending.
            values: As `out` of `on_received`.
            scale: See `on_received`.

        Returns:
            A factor for the whole result.
        """
        raise NotImplementedError

    def on_received_anywhere(self, name: str, out: Any, scale: float, arrays: Arrays) -> None:
        """See the result of an exchange where it lies, and change it. Only if `receives_anywhere`.

        Args:
            name: Name of the bucket.
            out: As `out` of `on_received`, an array of that kind.
            scale: See `on_received`.
            arrays: The kind.
        """

"""The interface of sparsifiers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from ..errors import ConfigError
from ..registry import Stage

#: Where a kernel takes a residual and there is none, or a selection has no values.
NO_VALUES = np.empty(0, np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """What a sparsifier knows beside the gradient's values.

    Attributes:
        stream: The random numbers of this gradient on this rank.
        sizes: Numbers of elements of the tensors that the gradient consists of, in order; they sum to d.
        chunk: Number of elements in each chunk of the transform; 0 without a transform.
    """

    stream: Stream
    sizes: tuple[int, ...]
    chunk: int = 0

    @classmethod
    def of_gradient(cls, stream: Stream, sizes: Iterable[int] | None, d: int) -> "Scope":
        """Return the scope of a gradient without a transform.

        Args:
            stream: See Scope.
            sizes: See Scope; None for a single tensor.
            d: Number of elements of the gradient.

        Returns:
            The scope.

        Raises:
            ConfigError: The sizes do not sum to d.
        """
        scope = cls(stream, (d,) if sizes is None else tuple(sizes))
        if sum(scope.sizes) != d:
            raise ConfigError(f"sizes: the tensors have {sum(scope.sizes)} elements, the gradient {d}")
        return scope


class Sparsifier(Stage):
    """Selects the positions whose values are sent.

    A subclass implements `select`. One that can do better than adding and then selecting overrides `select_compensated` too.
    """

    kind = "sparsifier"
    #: Whether all ranks select the same positions: those of `draw_positions` for k, d and the key of their shared stream.
    shared = False
    #: Whether it works only on the chunks of a transform.
    needs_chunks = False
    #: Whether the values are to be multiplied by d / k before they are sent.
    unbiased = False
    #: Whether `select_compensated` takes a gradient that does not lie in one array.
    takes_parts = False

    def select(self, dense: np.ndarray, scope: Scope) -> tuple[np.ndarray | None, np.ndarray]:
        """Select elements of a gradient.

        The selection is deterministic for a given scope, and ties go to the lowest index. If the gradient holds a NaN or an
        Inf and anything is selected, the values hold one as well.

        Args:
            dense: The gradient, float32[d].
            scope: Random numbers, sizes of the tensors, and the transform's chunk.

        Returns:
            The positions, uint32[k], strictly ascending, or None for all; and the values at these positions, float32[k].
            Both may lie in scratch arrays of this thread.
        """
        raise NotImplementedError

    def select_compensated(
        self, gradient: Any, residual: np.ndarray, out: np.ndarray, scope: Scope
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Select elements of gradient + residual.

        Args:
            gradient: float32[d]; or, if this `takes_parts`, a list of vectors float32 that together have d elements. They may
                lie in `out`, each at its place.
            residual: float32[d].
            out: Output, float32[d]: gradient + residual.
            scope: Random numbers, sizes of the tensors, and the transform's chunk.

        Returns:
            Positions and values as from `select`.
        """
        with non_finite_allowed():
            np.add(gradient, residual, out=out)
        return self.select(out, scope)

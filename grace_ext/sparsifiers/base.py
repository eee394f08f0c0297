"""What a sparsifier promises."""

import dataclasses

import numpy as np

from .._util.rng import Stream
from ..registry import Stage


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """What a sparsifier knows besides the numbers.

    stream: the random numbers of this gradient on this rank. sizes: the elements of the tensors that the gradient is made
    of, in their order; they sum to d. chunk: the elements that a transform has treated together, 0 if there was none.
    """

    stream: Stream
    sizes: tuple[int, ...]
    chunk: int = 0


class Sparsifier(Stage):
    """Chooses the positions that are sent.

    A subclass writes `select`; one that can do better than add-then-select overrides `select_compensated` too.
    """

    kind = "sparsifier"
    #: All ranks select the same positions: those that `draw_positions` gives for k, d and the key of their shared stream.
    shared = False
    #: Works on a transform's chunks only.
    needs_chunks = False
    #: What is sent is to be multiplied by d / k.
    unbiased = False

    def select(self, dense: np.ndarray, scope: Scope) -> tuple[np.ndarray | None, np.ndarray]:
        """dense: float32[d] -> (indices uint32[k], strictly ascending, or None for all; values float32[k] = dense[indices]).

        Both may lie in scratch arrays of this thread. Deterministic given the scope; ties go to the lowest index.
        If dense has a NaN or an Inf and anything is selected, so has values.
        """
        raise NotImplementedError

    def select_compensated(self, gradient: np.ndarray, residual: np.ndarray, out: np.ndarray, scope: Scope):
        """The same of gradient + residual, which is written to out. All float32[d]."""
        with np.errstate(over="ignore", invalid="ignore"):  # an Inf or NaN is no secret: the container says so
            np.add(gradient, residual, out=out)
        return self.select(out, scope)

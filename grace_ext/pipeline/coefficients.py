"""The selection of a transform's coefficients."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .._util.scratch import scratch
from ..kernels import NON_FINITE, max_magnitude
from ..sparsifiers.base import Scope


def select_coefficients(
    encoder: Any, dense: np.ndarray, residual: np.ndarray | None, pending: np.ndarray | None, scope: Scope
) -> tuple[np.ndarray | None, np.ndarray, Callable[[np.ndarray], np.ndarray]] | None:
    """Transform a gradient, and select from its coefficients.

    Args:
        encoder: The encoder whose transform and sparsifier do it.
        dense: The gradient, float32[d].
        residual: What is added to it before, float32[d]; None for nothing.
        pending: Output with a residual, float32[d]: dense + residual.
        scope: What the coefficients are.

    Returns:
        The positions, uint32[k], strictly ascending, or None for all; the coefficients there, float32[k]; and what returns
        them at the positions that an index codec rebuilds. None if an element of dense + residual is not finite.
    """
    sparsifier, transform = encoder.sparsifier, encoder.transform
    if sparsifier.needs_chunks and encoder.index.lossless and transform.selects:
        selected = transform.largest_of_chunks(dense, residual, pending, sparsifier.count(transform.chunk))
        return None if selected is None else (*selected, lambda support: selected[1])
    if residual is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            dense = np.add(dense, residual, out=pending)
    if max_magnitude(dense) >= NON_FINITE:
        return None
    coefficients = scratch("coefficients", np.float32, scope.sizes[0])
    transform.forward(dense, coefficients)
    return *sparsifier.select(coefficients, scope), lambda support: coefficients[support]

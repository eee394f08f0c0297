"""Levels from counts that something else has made, as an accelerator does: the first half of `quantize`."""

import numpy as np

from ._compile import kernel
from .lloyd import HEAD, bin_width, choose_by_counts, put_head, used_bins


@kernel(
    "int64(Array(int32, 1, 'C', readonly=True), int64, int64, Array(float64, 1, 'C', readonly=True), float64, uint8[::1],"
    " float32[::1])"
)
def choose_from_counts(counts, total, k, moments, error, head, places):
    """Choose the levels of `quantize`; returns how many there are on each side.

    counts: int32[BINS], the magnitudes in each bin, whose width is `bin_width`; total: how many of the k values were counted.
    moments: float64[3], the sum of squares, the smallest and the largest magnitude. head: uint8[HEAD + FRACTIONS], written as
    if no value were beyond the levels. places: float32[2], written: the inverse of the step, and what is to be added to a
    magnitude in steps for its level.
    """
    grid, fractions, most = np.zeros(2, np.float32), head[HEAD:], 0
    places[:] = np.float32(0)
    head[:] = np.uint8(0)
    if moments[0] != 0:
        width = bin_width(moments, k, error)
        bins = used_bins(moments, width)
        sums = np.zeros((bins + 1, 3))
        for j in range(bins):
            sums[j + 1, 0] = np.float64(counts[j])
        most = choose_by_counts(sums, bins, np.float64(total), moments, width, grid, fractions)
        places[0] = np.float32(np.float32(1) / grid[1])
        places[1] = np.float32(np.float32(1) - grid[0] / grid[1])
    put_head(most, grid, 0, head)
    return most

"""The step of the local_adamw adapter's AdamW, whose second moment is that of a moving average, by rows and columns."""

import numpy as np

from ._compile import kernel
from ._helpers import step_row
from ._intrinsics import helper
from ._sums import LANES, add_square_rows, sum_in_order

_TINY = np.finfo(np.float32).tiny


@helper
def _approach(averages, values, share):
    """averages += share * (values - averages), float32[n]."""
    for i in range(averages.size):
        averages[i] += share * (values[i] - averages[i])


@kernel(
    "void(float32[::1], Array(float32, 1, 'C', readonly=True), float32[::1], float32[::1], float32[::1], float32[::1], float32,"
    " float32, float32, float32, float32, float32, float32, float32)"
)
def local_adamw_step(
    parameters, gradient, first, average, by_row, by_column, share1, share, share2, square, unbias2, eps, value, shrink
):
    """Make a step with a matrix of r rows and c columns:

        first += share1 * (g - first);  average += share * (g - average);  s = square * average**2
        by_row += share2 * (mean of s over each row - by_row);  by_column likewise, or with one number for all columns
        p = shrink * p + value * first / (sqrt(unbias2 * by_row[i] * by_column[j] / mean(by_row)) + eps)

    parameters, gradient, first, average: float32[r * c], row by row; by_row: float32[r]; by_column: float32[c], or float32[1] for one
    second moment of all columns. All but the gradient are changed. eps > 0.
    """
    rows = by_row.size
    if parameters.size == 0:
        return
    width = parameters.size // rows
    row_sums, columns, lanes = np.empty(rows, np.float32), np.zeros(width, np.float32), np.empty(2 * LANES, np.float32)
    for i in range(0, rows, 2):  # two rows at a time are added up, while they are in the cache
        start, stop = i * width, min(i + 2, rows) * width
        _approach(first[start:stop], gradient[start:stop], share1)
        _approach(average[start:stop], gradient[start:stop], share)
        add_square_rows(average[start:stop], row_sums[i : min(i + 2, rows)], columns, lanes)
    for i in range(rows):
        by_row[i] += share2 * (row_sums[i] * (square / np.float32(width)) - by_row[i])
    if by_column.size == width:
        for j in range(width):
            by_column[j] += share2 * (columns[j] * (square / np.float32(rows)) - by_column[j])
            columns[j] = np.sqrt(by_column[j])
    else:
        by_column[0] += share2 * (np.float32(sum_in_order(columns) / parameters.size) * square - by_column[0])
        columns[:] = np.sqrt(by_column[0])
    mean = np.float32(sum_in_order(by_row) / rows)
    if mean < _TINY:
        mean = _TINY
    for i in range(rows):
        root = np.sqrt(by_row[i] / mean * unbias2)
        step_row(
            parameters[i * width : (i + 1) * width], first[i * width : (i + 1) * width], root, columns, eps, value, shrink
        )

"""How large the elements of a gradient are, and which of several choices a layer gets: for budgets of bytes."""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE
from ._intrinsics import bits_of

SHIFT = np.uint32(19)  # a shift of a magnitude's bits that leaves 8 bits of exponent and 4 of mantissa
BINS = 1 << 12
LANES = 4  # histograms side by side, so that neighbours that fall into the same bin need not wait for each other


@kernel("void(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), boolean, int64[:, ::1])")
def magnitude_histogram(gradient, residual, compensated, counts):
    """Count the elements by the leading bits of their magnitude: counts[:, bin] += their number.

    It counts those of gradient + residual if compensated, and of gradient otherwise; only the sum over the first axis has a
    meaning. gradient, residual: float32[d]; counts: int64[LANES, BINS]. Not compensated, residual is ignored.
    """
    d = gradient.size
    whole = d // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            x = gradient[i + lane]
            if compensated:
                x = np.float32(x + residual[i + lane])
            counts[lane, (bits_of(x) & MAGNITUDE) >> SHIFT] += 1
    for i in range(whole, d):
        x = gradient[i]
        if compensated:
            x = np.float32(x + residual[i])
        counts[0, (bits_of(x) & MAGNITUDE) >> SHIFT] += 1


@kernel("boolean(int64[:, ::1], float64[:, ::1], float64[:, ::1], uint8[:, ::1], int64[::1])")
def knapsack(weights, values, best, taken, chosen):
    """Make one choice in each row, so that the weights sum to at most the capacity and the sum of the values is the least.

    weights: int64[rows, choices], >= 0; values: float64[rows, choices], >= 0; at most 256 choices. best: float64[2, capacity
    + 1] and taken: uint8[rows, capacity + 1], to work in. chosen: int64[rows], the result. Returns whether there is one.
    """
    rows, choices = weights.shape
    capacity = best.shape[1] - 1
    best[0, :] = 0.0
    for row in range(rows):
        old, new = best[row % 2], best[(row + 1) % 2]
        new[:] = np.inf
        for choice in range(choices):
            weight, value = weights[row, choice], values[row, choice]
            for room in range(weight, capacity + 1):
                total = old[room - weight] + value
                if total < new[room]:
                    new[room] = total
                    taken[row, room] = np.uint8(choice)
    if not best[rows % 2, capacity] < np.inf:
        return False
    room = capacity
    for row in range(rows - 1, -1, -1):
        chosen[row] = taken[row, room]
        room -= weights[row, chosen[row]]
    return True

"""Slow, readable reference implementations of the kernels in grace_ext/kernels/positions.py and of select_above."""

import numpy as np

from support import reference_kernels


def above(values, bound):
    """Where the bits of the magnitude are at least `bound`: int64[n]."""
    return np.flatnonzero(reference_kernels.magnitudes(values) >= bound)


def draw_positions(k, d, low, high):
    """One of each of k strata of a circle of d, turned: a list of k positions, ascending."""
    step = -(-d * 2**32 // k)

    def first(s):
        return s * step >> 32

    offset = (reference_kernels.random32(k, low, high) << 32 | reference_kernels.random32(k + 1, low, high)) % d
    drawn = [first(s) + (reference_kernels.random32(s, low, high) * (first(s + 1) - first(s)) >> 32) for s in range(k)]
    return sorted((position + offset) % d for position in drawn)

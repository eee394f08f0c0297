"""What kernels of several files share. A change here recompiles all of them."""

import numpy as np

from ._intrinsics import bits_of, helper


@helper
def random32(i, low, high):
    """A counter-based random uint32 (the murmur3 finalizer, keyed twice). Each step is wrapped to 32 bits so that
    it vectorises: Numba widens uint32 arithmetic to 64 bits."""
    x = np.uint32(np.uint32(np.uint32(i) * np.uint32(0x9E3779B1)) ^ low)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(x + high)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@helper
def largest_magnitude(values):
    """The bits of the largest magnitude in float32[n]."""
    largest = np.uint32(0)
    for i in range(values.size):
        x = np.uint32(bits_of(values[i]) & np.uint32(0x7FFFFFFF))
        largest = x if x > largest else largest
    return largest

"""Positions that all ranks draw alike from a key."""

import numpy as np

from ._compile import kernel
from ._helpers import random32
from ._intrinsics import helper

_HALF = np.uint64(32)


@helper
def _draw(s, step, low, high):
    """Return the position drawn in stratum s. Strata begin at s * step / 2**32, rounded down."""
    first = np.uint64(np.uint64(s) * step) >> _HALF
    length = (np.uint64(np.uint64(s + np.uint64(1)) * step) >> _HALF) - first
    return first + (np.uint64(np.uint64(random32(s, low, high)) * length) >> _HALF)


@kernel("void(uint32[::1], int64, uint32, uint32)")
def draw_positions(out, d, low, high):
    """Draw strictly ascending positions below d with the key (low, high). out: uint32[k], 1 <= k <= d < 2**31.

    One position is drawn in each of k equal strata, and all are shifted by one offset on a circle of d. Each position is
    drawn with probability k / d.
    """
    k, size = np.uint64(out.size), np.uint64(d)
    step = ((size << _HALF) + k - np.uint64(1)) // k
    word = np.uint64(random32(k, low, high)) << _HALF | np.uint64(random32(k + np.uint64(1), low, high))
    offset = word % size
    room = size - offset  # positions from here on are shifted past the end, to the beginning
    turned = (room << _HALF) // step
    if turned < k and _draw(turned, step, low, high) < room:
        turned += np.uint64(1)
    for i in range(k - turned):
        out[i] = np.uint32(_draw(turned + i, step, low, high) - room)
    late = out[np.int64(k - turned) :]
    for i in range(turned):
        late[i] = np.uint32(_draw(i, step, low, high) + offset)

"""Levels told by the sign of the level before: values that lie next to each other in a tensor often have the same sign.

A level below the middle makes the next one change places with the one on the other side of the middle, so that levels of
the same sign as the one before are all above the middle, and an entropy code sees how frequent they are.
"""

import numpy as np

from ._compile import kernel
from ._helpers import n_log2
from ._intrinsics import helper

ROW = 64  # levels that are decoded in one go


@helper
def _bits(a, b):
    """Return the bits of an entropy code for a + b outcomes, a of one kind and b of the other."""
    return n_log2(a + b) - n_log2(a) - n_log2(b)


@kernel("float64(Array(uint8, 1, 'C', readonly=True), int64)")
def signs_saved(levels, middle):
    """Return about how many bits an entropy code of uint8[k], k >= 1, saves by mirror_levels; below 0 if it loses."""
    m = np.uint8(middle)
    negative, positive, same = 0, 0, 0  # those behind a level below or above the middle
    for i in range(1, levels.size):
        before, level = levels[i - 1], levels[i]
        below, above = level < m, level > m
        negative += below & (before != m)
        positive += above & (before != m)
        same += (below & (before < m)) | (above & (before > m))
    return _bits(negative, positive) - _bits(same, negative + positive - same)


@kernel("void(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1])")
def mirror_levels(levels, middle, out):
    """Write uint8[k] with those mirrored at the middle, 0 to 127, that follow a level below it.

    A level above 2 * middle has no other side: it is written as it is. levels, out: uint8[k], k >= 1.
    """
    m, most = np.uint8(middle), np.uint8(2 * middle)
    out[0] = levels[0]
    for i in range(1, levels.size):
        level = levels[i]
        out[i] = np.uint8(most - level) if (levels[i - 1] < m) & (level <= most) else level


@kernel("void(uint8[::1], int64)")
def unmirror_levels(levels, middle):
    """Undo mirror_levels in place.

    Whether a level is mirrored depends on the one before, by two operations on masks; all else runs on 64 levels at once.
    """
    m, most = np.uint8(middle), np.uint8(2 * middle)
    keeps, turns = np.empty(ROW, np.uint8), np.empty(ROW, np.uint8)  # masks of 8 bits
    mirrored = np.uint8(0)
    for start in range(0, levels.size, ROW):
        row = levels[start : start + ROW]
        for i in range(row.size):
            level = row[i]
            keeps[i] = np.uint8(0xFF) if (level <= most) & (level != m) else np.uint8(0)
            turns[i] = np.uint8(0xFF) if level < m else np.uint8(0)
        for i in range(row.size):
            before = mirrored
            mirrored = np.uint8(np.uint8(mirrored & keeps[i]) ^ turns[i])
            turns[i] = before
        for i in range(row.size):
            level = row[i]
            row[i] = np.uint8(most - level) if (turns[i] != 0) & (level <= most) else level

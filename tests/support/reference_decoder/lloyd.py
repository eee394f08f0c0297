"""lloyd, decoded slowly from docs/container-format.md."""

import struct

import numpy as np

from support.reference_decoder import levels as levels_decoder

FLT_MAX = float(np.finfo(np.float32).max)


def lloyd(section, k):
    most, start, step, count = struct.unpack_from("<BffI", section)
    shared = min(most, 16)
    fractions, at = section[13 : 13 + shared], 13 + shared
    escapes = iter(struct.unpack_from(f"<{count}f", section, at))
    values = []
    for code in levels_decoder.levels(section[at + 4 * count :], 2 * most + (2 if count else 1), k):
        level = code - most
        if level > most:
            values.append(next(escapes))
        elif level == 0:
            values.append(0.0)
        else:
            m = abs(level) - 1
            magnitude = min(start + (m + (fractions[min(m, 15)] + 0.5) / 256) * step, FLT_MAX)
            values.append(float(np.float32(magnitude if level > 0 else -magnitude)))
    assert next(escapes, None) is None
    return values


VALUE = {14: lloyd}

"""The second decoder of polyfit, dexp and sketchml."""

import struct

from support.reference_decoder import levels as levels_decoder
from support.reference_kernels import fits as reference_fits


def polyfit(section, k):
    degree, *counts = section[:3]
    segments = sum(counts)
    at = 3
    lengths = struct.unpack_from(f"<{segments}I", section, at)
    at += 4 * segments
    edges = []
    for count in counts:
        edges.append(struct.unpack_from(f"<{count + 1 if count else 0}f", section, at))
        at += 4 * len(edges[-1])
    values, s = [], 0
    for sign, count, bounds in zip((1, -1), counts, edges, strict=True):
        for i in range(count):
            c = struct.unpack_from(f"<{degree + 1}f", section, at)
            at += 4 * (degree + 1)
            values += [sign * v for v in reference_fits.segment(c, bounds[i], bounds[i + 1], lengths[s])]
            s += 1
    assert at == len(section) and len(values) == k
    return values


def dexp(section, k):
    (p,) = struct.unpack_from("<I", section)
    values, at = [], 4
    for sign, n in ((1, p), (-1, k - p)):
        if n:
            low, high, *fit = struct.unpack_from("<6f", section, at)
            at += 24
            values += [sign * v for v in reference_fits.exponentials(fit, low, high, n)]
    assert at == len(section)
    return values


def sketchml(section, k):
    used = section[0] + 1
    table = struct.unpack_from(f"<{used}f", section, 1)
    return [table[level] for level in levels_decoder.levels(section[1 + 4 * used :], used, k)]


VALUE = {10: polyfit, 11: dexp, 12: sketchml}

"""Slow reference implementations of the 16-bit conversions and of the quantizers' kernels."""

import math
import re
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np

from support.reference_kernels import random32

# 16 bits


def bfloat16(x):
    """The 16 bits of the bfloat16 nearest to a finite float32, of two the one whose last bit is 0; never Inf."""
    low = int(np.float32(abs(x)).view(np.uint32)) >> 16
    below, above = (Fraction(un_bfloat16(bits)) if bits < 0x7F80 else Fraction(2) ** 128 for bits in (low, low + 1))
    rest, step = Fraction(float(abs(x))) - below, above - below
    nearest = low + (2 * rest > step or (2 * rest == step and low % 2))
    return min(nearest, 0x7F7F) | (math.copysign(1, x) < 0) << 15


def un_bfloat16(bits):
    """The value of a bfloat16 with a finite value: sign, 8 bits of exponent, 7 of mantissa."""
    exponent, mantissa = bits >> 7 & 255, bits & 127
    value = (128 + mantissa) * 2.0 ** (exponent - 134) if exponent else mantissa * 2.0**-133
    return -value if bits >> 15 else value


# Affine


def minmax(values, chunk, top):
    """(ranges float32[chunks, 2], levels int[k]); Python's floats are float64."""
    ranges, levels = [], []
    for start in range(0, len(values), chunk):
        part = [float(x) for x in values[start : start + chunk]]
        low, high = (pick(part, key=lambda x: (x, math.copysign(1, x))) for pick in (min, max))
        ranges.append((low, high))
        scale = top / (high - low) if high > low else 0.0
        levels += [int((x - low) * scale + 0.5) for x in part]
    return np.array(ranges, np.float32), levels


def un_minmax(levels, chunk, top, ranges):
    low, high = (ranges.astype(float)[[i // chunk for i in range(len(levels))]]).T
    return (low + np.array(levels, float) * ((high - low) / top)).astype(np.float32)


# Powers of two


def natural(values, lowest, count, low, high):
    """Levels int[k]: the exact fraction of the smallest power that is not above, and 23 random bits."""
    levels = []
    for i, x in enumerate(values):
        magnitude = Fraction(float(abs(x)))
        power = 0  # of 2**(lowest - 127), and twice as much for each more
        while magnitude >= Fraction(2) ** (lowest + power - 126):
            power += 1
        units = int(magnitude / Fraction(2) ** (lowest + power - 127) * 2**23)
        level = min(power + (units + (random32(i, low, high) >> 9) >> 23), count)
        levels.append(count - level if math.copysign(1, x) < 0 else count + level)
    return levels


def un_natural(levels, lowest, zero):
    return [
        math.copysign(2.0 ** (lowest + abs(level - zero) - 128), level - zero) if level != zero else 0.0 for level in levels
    ]


# Ternary


def ternary(values, bucket, low, high):
    """(norms float32[buckets], digits int[k]); every operation in float32, in this order."""
    f = np.float32
    norms, found = [], []
    for start in range(0, len(values), bucket):
        part = values[start : start + bucket]
        norm = max(abs(x) for x in part)
        norm = norm if norm >= f(2.0**-100) else f(0)
        norms.append(norm)
        for i, x in enumerate(part):
            uniform = f(random32(start + i, low, high) >> 9) + f(0.5)
            one = norm > 0 and uniform <= abs(x) * (f(2.0**23) / norm)
            found.append(1 + (int(np.sign(x)) if one else 0))
    return np.array(norms, np.float32), found


def fives(digits):
    filled = [*digits, *[1] * (-len(digits) % 5)]
    return bytes(
        81 * a + 27 * b + 9 * c + 3 * d + e for a, b, c, d, e in (filled[i : i + 5] for i in range(0, len(filled), 5))
    )


def fold(packed):
    return re.sub(b"y{2,14}", lambda run: bytes([241 + len(run[0])]), packed)


# Signs


def onebit(values, bucket):
    """(means float32[buckets, 2], bits). The sums of the 16 lanes are added up one after the other, in float64."""
    means = []
    for start in range(0, len(values), bucket):
        part = [float(x) for x in values[start : start + bucket]]
        for chosen in (lambda x: x >= 0, lambda x: x < 0):
            lanes = [reduce(add, (x for x in part[lane::16] if chosen(x)), 0.0) for lane in range(16)]
            count = sum(map(chosen, part))
            means.append(np.float32(reduce(add, lanes) / count) if count else np.float32(0))
    return np.array(means, np.float32).reshape(-1, 2), [int(x < 0) for x in values]

"""Slow twins of the 16-bit conversions and of the quantizers' kernels, as in twins.py."""

import math
from fractions import Fraction

import numpy as np

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
    value = (128 + mantissa) * 2.0 ** (exponent - 134) if exponent else mantissa * 2.0 ** -133
    return -value if bits >> 15 else value

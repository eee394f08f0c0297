"""What kernels of several files have in common. A change here recompiles all of them."""

import numpy as np

from ._intrinsics import bits_of, float_of, helper, load64, quotient

MAGNITUDE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign
NON_FINITE = np.uint32(0x7F800000)  # magnitudes from here on are Inf and NaN
WHOLE_BYTES = np.uint64(56)  # of at most 63 bits, the mask gives those in whole bytes
MAX_SHIFT = 30  # the most low bits of an index or a run that are stored as they are
STREAMED = 4 * 1024 * 1024  # number of floats from which on they bypass the caches, in which they would not stay anyway
MANTISSA = 3  # bits behind the highest one that tables of frequencies keep


@helper
def random32(i, low, high):
    """Return a counter-based random uint32: the finalizer of MurmurHash3, keyed twice.

    Each step is wrapped to 32 bits so that it vectorises, because Numba widens uint32 arithmetic to 64 bits.
    """
    x = np.uint32(np.uint32(np.uint32(i) * np.uint32(0x9E3779B1)) ^ low)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(x + high)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@helper
def largest_magnitude(values):
    """Return the bits of the largest magnitude in float32[n]."""
    largest = np.uint32(0)
    for i in range(values.size):
        x = np.uint32(bits_of(values[i]) & MAGNITUDE)
        largest = x if x > largest else largest
    return largest


@helper
def magnitude_range(values):
    """Return the bits of the smallest and of the largest magnitude in float32[n] that are not 0; (0, 0) if all are."""
    smallest, largest = np.uint32(0xFFFFFFFF), np.uint32(0)
    for i in range(values.size):
        magnitude = np.uint32(bits_of(values[i]) & MAGNITUDE)
        less = np.uint32(magnitude - np.uint32(1))  # of a zero: the largest number
        smallest = less if less < smallest else smallest
        largest = magnitude if magnitude > largest else largest
    return np.uint32(smallest + np.uint32(1)), largest


@helper
def squeeze(word, bits):
    """Pack 8 codes of a byte each to 8 codes of `bits` bits."""
    two, four = bits + bits, np.uint64(4) * bits
    word = (word & np.uint64(0x00FF00FF00FF00FF)) | (((word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)) << bits)
    word = (word & np.uint64(0x0000FFFF0000FFFF)) | (((word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)) << two)
    return (word & np.uint64(0xFFFFFFFF)) | ((word >> np.uint64(32)) << four)


@helper
def spread(word, bits):
    """The inverse of squeeze. Bits above the eighth code are ignored."""
    one = np.uint64(1)
    two, four = bits + bits, np.uint64(4) * bits
    mask = (one << four) - one
    word = (word & mask) | (((word >> four) & mask) << np.uint64(32))
    mask = ((one << two) - one) * np.uint64(0x100000001)
    word = (word & mask) | (((word >> two) & mask) << np.uint64(16))
    mask = ((one << bits) - one) * np.uint64(0x0001000100010001)
    return (word & mask) | (((word >> bits) & mask) << np.uint64(8))


@helper
def word_at(stream, at):
    """Return the 8 bytes of uint8[m] from `at` >= 0 on as a uint64, with zeros past the end."""
    if at + 8 <= stream.size:
        return load64(stream, at)
    word = np.uint64(0)
    for i in range(stream.size - 1, at - 1, -1):
        word = (word << np.uint64(8)) | np.uint64(stream[i])
    return word


@helper
def log2(x):
    """Return the binary logarithm of a float64 >= 1, within 1e-4.

    It is computed from the bits, so that it is the same on every machine.
    """
    u = bits_of(np.float32(x))
    m = np.float64(float_of(np.uint32((u & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000))))
    z = (m - 1.0) / (m + 1.0)
    z2 = z * z
    series = z * (1.0 + z2 * (1.0 / 3 + z2 * (0.2 + z2 / 7)))  # artanh(z) = ln(m) / 2
    return np.float64(np.int64(u >> np.uint32(23)) - 127) + series * 2.8853900817779268


@helper
def n_log2(n):
    """Return n * log2(n) of an integer n >= 0, 0 for n = 0."""
    return n * log2(np.float64(n)) if n > 1 else 0.0


@helper
def step_row(p, g, scale, by_column, eps, value, shrink):
    """p = shrink * p + value * g / (scale * by_column + eps), all float32[n] or numbers."""
    for j in range(p.size):
        p[j] = shrink * p[j] + quotient(value * g[j], scale * by_column[j] + eps)

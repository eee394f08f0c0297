"""Three levels, -1, 0 and 1, as the digits 0, 1 and 2; five digits in a byte; and runs of bytes that hold five zeros."""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE, largest_magnitude, random32
from ._intrinsics import bits_of, float_of, helper, load64, store64

_SMALLEST = np.float32(2.0**-100)  # below it, 2**23 / norm would overflow; such a bucket is sent as zeros
_ZEROS = np.uint8(121)  # the byte of five digits 1
_RUN = np.uint8(243)  # the first byte that is not one of five digits; it stands for a run of two


@helper
def _ternary(values, scale, low, high, first, digits):
    for i in range(values.size):
        x = bits_of(values[i])
        # 23 random bits and a half are exact in float32: the chance of a one is off by 2**-24 at most, 0 for a zero.
        uniform = np.float32(np.int32(random32(first + np.uint32(i), low, high) >> np.uint32(9))) + np.float32(0.5)
        one = uniform <= np.float32(float_of(np.uint32(x & MAGNITUDE)) * scale)
        step = np.int32(1) if one else np.int32(0)
        digits[i] = np.uint8(np.int32(np.int32(1) + (-step if x >= np.uint32(0x80000000) else step)))


@kernel("void(Array(float32, 1, 'C', readonly=True), int64, uint32, uint32, float32[::1], uint8[::1])")
def ternary_stochastic(values, bucket, key_low, key_high, norms, digits):
    """Round finite values to 0 or +- the largest magnitude of their bucket, unbiased.

    values: float32[k]; norms: float32[ceil(k / bucket)] and digits: uint8[k], written. The random numbers depend only on the
    key and the value's position.
    """
    for b in range(norms.size):
        start, end = b * bucket, min(values.size, (b + 1) * bucket)
        norm = float_of(largest_magnitude(values[start:end]))
        norm = norm if norm >= _SMALLEST else np.float32(0)
        norms[b] = norm
        scale = np.float32(np.float32(2.0**23) / norm) if norm > 0 else np.float32(0)
        _ternary(values[start:end], scale, key_low, key_high, np.uint32(start), digits[start:end])


@kernel("void(Array(float32, 1, 'C', readonly=True), uint32, uint8[::1])")
def ternary_nearest(values, bound, digits):
    """Write digits, uint8[k], for values, float32[k]: +-1 where the bits of the magnitude are at least `bound`."""
    for i in range(values.size):
        x = bits_of(values[i])
        step = np.int32(1) if np.uint32(x & MAGNITUDE) >= bound else np.int32(0)
        digits[i] = np.uint8(np.int32(np.int32(1) + (-step if x >= np.uint32(0x80000000) else step)))


@helper
def _scale_digits(digits, norm, out):
    for i in range(out.size):
        out[i] = np.float32(np.int32(digits[i]) - np.int32(1)) * norm


@kernel("void(Array(uint8, 1, 'C', readonly=True), int64, Array(float32, 1, 'C', readonly=True), float32[::1])")
def ternary_decode(digits, bucket, norms, out):
    """Write (digit - 1) * the norm of its bucket. digits: uint8[k or more], out: float32[k]."""
    for b in range(norms.size):
        start, end = b * bucket, min(out.size, (b + 1) * bucket)
        _scale_digits(digits[start:end], norms[b], out[start:end])


@kernel("void(Array(uint8, 1, 'C', readonly=True), uint8[::1])")
def pack_fives(digits, out):
    """Pack digits, uint8[k], each 0 to 2, into uint8[ceil(k / 5)].

    The first of five is the most significant; digits 1 fill the last byte.
    """
    whole = max((digits.size - 3) // 5, 0)  # so that 8 bytes can be read
    for j in range(whole):
        # Byte 4 of the product is the sum of digit i times 3**(4 - i); no byte below it carries.
        word = load64(digits, 5 * j) & np.uint64(0xFFFFFFFFFF)
        out[j] = np.uint8(((word * np.uint64(0x511B090301)) >> np.uint64(32)) & np.uint64(0xFF))
    for j in range(whole, out.size):
        total = 0
        for i in range(5 * j, 5 * j + 5):
            total = 3 * total + (np.int64(digits[i]) if i < digits.size else 1)
        out[j] = np.uint8(total)


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1])")
def unpack_fives(packed, k, digits):
    """The inverse of pack_fives. packed: uint8[ceil(k / 5)]; digits: uint8[5 * packed.size + 3], written.

    Returns False if a byte is not that of five digits, or those behind the k-th are not 1.
    """
    table = np.zeros(256, np.uint64)
    for byte in range(243):
        rest = byte
        for _ in range(5):
            table[byte] = (table[byte] << np.uint64(8)) | np.uint64(rest % 3)
            rest //= 3
    largest = np.uint8(0)
    for j in range(packed.size):
        largest = max(largest, packed[j])
        store64(digits, 5 * j, table[packed[j]])
    good = largest < 243
    for i in range(k, 5 * packed.size):
        good &= digits[i] == 1
    return good


@kernel("int64(uint8[::1], int64)")
def fold_zeros(packed, size):
    """Replace runs of 2 to 14 bytes 121 in packed[:size] by one byte 243 to 255, in place; returns the new size."""
    end = i = 0
    while i < size:
        byte = packed[i]
        i += 1
        if byte == _ZEROS:
            run = 1
            while run < 14 and i < size and packed[i] == _ZEROS:
                run += 1
                i += 1
            if run > 1:
                byte = np.uint8(np.int64(_RUN) + run - 2)
        packed[end] = byte
        end += 1
    return end


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), uint8[::1])")
def unfold_zeros(folded, packed):
    """The inverse of fold_zeros. Returns False if the result does not have packed.size bytes."""
    end = 0
    for byte in folded:
        run = max(np.int64(byte) - 241, 1)
        if end + run > packed.size:
            return False
        if byte < _RUN:
            packed[end] = byte
        else:
            for i in range(run):
                packed[end + i] = _ZEROS
        end += run
    return end == packed.size

"""Sums of vectors in an order that is the same on every processor. Only kernels use them."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ._helpers import random32
from ._intrinsics import _pointer, helper

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_EIGHT = ir.VectorType(ir.FloatType(), 8)
LANES = 8  # numbers of a sketch
SKETCH_BLOCK = 256  # elements, in rows of 8: 32 signs
SKETCH_SUMS = 256  # sums of blocks, which an accelerator adds up side by side
SKETCH_ROOM = LANES * (SKETCH_SUMS + 1)  # and the sum of what is no whole block
SQUARES_BLOCK = 4096  # values whose squares an accelerator's threads add up side by side with those of other blocks


def _rows_of_8(context, builder, signature, args, array, at):
    """The pointer to eight floats of the argument `array` at the index that is the argument `at`."""
    first = builder.gep(_pointer(context, builder, signature.args[array], args[array]), [at])
    return builder.bitcast(first, _EIGHT.as_pointer())


def _load(builder, pointer):
    row = builder.load(pointer)
    row.align = 4
    return row


def _add_to(builder, pointer, totals):
    """Add four vectors to the one at the pointer."""
    total = builder.fadd(builder.fadd(totals[0], totals[1]), builder.fadd(totals[2], totals[3]))
    builder.store(builder.fadd(_load(builder, pointer), total), pointer).align = 4


@intrinsic
def _add_signed256(typingctx, values, at, word, sums, to):
    """sums[to + j] += values[at + j] ± values[at + 8 + j] ± … for j = 0 to 7: rows of 8, row i negative if bit i of word is set.

    values, sums: float32. Four sums are kept for each j, because each addition waits for the one before.
    """
    signature = types.void(values, types.int64, types.uint32, sums, types.int64)

    def generate(context, builder, signature, args):
        bits = ir.VectorType(_I32, 8)
        one = builder.insert_element(ir.Constant(bits, ir.Undefined), args[2], ir.Constant(_I32, 0))
        words = builder.shuffle_vector(one, ir.Constant(bits, ir.Undefined), ir.Constant(bits, [0] * 8))
        sign, totals = ir.Constant(bits, [1 << 31] * 8), [ir.Constant(_EIGHT, [0.0] * 8)] * 4
        first = _rows_of_8(context, builder, signature, args, 0, args[1])
        for i in range(32):
            row = _load(builder, builder.gep(first, [ir.Constant(_I64, i)]))
            flip = builder.and_(builder.shl(words, ir.Constant(bits, [31 - i] * 8)), sign)
            signed = builder.bitcast(builder.xor(builder.bitcast(row, bits), flip), _EIGHT)
            totals[i % 4] = builder.fadd(totals[i % 4], signed)
        _add_to(builder, _rows_of_8(context, builder, signature, args, 3, args[4]), totals)
        return context.get_dummy_value()

    return signature, generate


def _make_add_squares64(rows):
    @intrinsic
    def add_squares64(typingctx, values, width, at, columns, sums):
        """Add the squares of 64 columns of some rows, of which there are `width` elements each, to sums of columns and rows.

        columns[at + i] += values[r * width + at + i]**2, row after row, for i = 0 to 63, and sums[8 * r + j] += these squares
        for all i with i % 8 == j. All arrays are float32.
        """
        signature = types.void(values, types.int64, types.int64, columns, sums)

        def generate(context, builder, signature, args):
            totals, zero = [[ir.Constant(_EIGHT, [0.0] * 8)] * 4 for _ in range(rows)], ir.Constant(_I64, 0)
            starts = [args[2]]
            for _ in range(rows - 1):
                starts.append(builder.add(starts[-1], args[1]))
            firsts = [_rows_of_8(context, builder, signature, args, 0, start) for start in starts]
            column = _rows_of_8(context, builder, signature, args, 3, args[2])
            for i in range(8):
                place = builder.gep(column, [ir.Constant(_I64, i)])
                total = _load(builder, place)
                for first, own in zip(firsts, totals, strict=True):
                    row = _load(builder, builder.gep(first, [ir.Constant(_I64, i)]))
                    square = builder.fmul(row, row)
                    total = builder.fadd(total, square)
                    own[i % 4] = builder.fadd(own[i % 4], square)
                builder.store(total, place).align = 4
            place = _rows_of_8(context, builder, signature, args, 4, zero)
            for r, own in enumerate(totals):
                _add_to(builder, builder.gep(place, [ir.Constant(_I64, r)]), own)
            return context.get_dummy_value()

        return signature, generate

    return add_squares64


_add_squares64, _add_squares64_twice = _make_add_squares64(1), _make_add_squares64(2)


@helper
def sum_in_order(values):
    """Return the sum of float32[n] in float64."""
    total = np.float64(0)
    for i in range(values.size):
        total += np.float64(values[i])
    return total


@helper
def sum8(x):
    """The sum of eight numbers, in a fixed order."""
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]))


@helper
def add_square_rows(values, rows, columns, lanes):
    """rows = the sums of squares of each row; columns += the squares of each row, one row after the other.

    values: float32[r * c], a matrix row by row; rows: float32[r]; columns: float32[c]; lanes: float32[16], overwritten.
    """
    width = columns.size
    whole = width & ~63
    i = 0
    while i < rows.size:
        both = i + 1 < rows.size
        row = values[i * width : (i + 1 + both) * width]
        lanes[:] = 0
        if both:
            for at in range(0, whole, 64):
                _add_squares64_twice(row, width, at, columns, lanes)
        else:
            for at in range(0, whole, 64):
                _add_squares64(row, width, at, columns, lanes)
        for r in range(1 + both):
            for at in range(whole, width):
                square = row[r * width + at] * row[r * width + at]
                columns[at] += square
                lanes[8 * r + at % 8] += square
            rows[i + r] = sum8(lanes[8 * r : 8 * r + 8])
        i += 1 + both


@helper
def add_sketch(values, start, stop, low, high, sums):
    """Add values[start:stop] to the sums of a sketch; see second_moment.random_sketch. start is a multiple of SKETCH_BLOCK.

    sums: float32[SKETCH_ROOM], zeros at first. Block b is added to sum b % SKETCH_SUMS, and what is no whole block to the last one.
    """
    whole = start + ((stop - start) & ~(SKETCH_BLOCK - 1))
    for at in range(start, whole, SKETCH_BLOCK):
        block = at // SKETCH_BLOCK
        _add_signed256(values, at, random32(np.uint32(block), low, high), sums, LANES * (block & (SKETCH_SUMS - 1)))
    word = random32(np.uint32(whole // SKETCH_BLOCK), low, high)
    for at in range(whole, stop):
        sign = np.float32(1) - np.float32(2) * np.float32(word >> np.uint32((at - whole) // LANES) & np.uint32(1))
        sums[LANES * SKETCH_SUMS + at % LANES] += sign * values[at]


@helper
def end_sketch(sums, size, sketch):
    """sketch = the total of the sums that add_sketch has made of `size` values. sums: overwritten.

    The second half of the sums is added to the first, and so on, and the last one at the end.
    """
    half = SKETCH_SUMS // 2
    while half > 0:
        if half * SKETCH_BLOCK < size:  # else the second half is zeros
            for i in range(half * LANES):
                sums[i] += sums[half * LANES + i]
        half //= 2
    for i in range(LANES):
        sketch[i] = sums[i] + sums[LANES * SKETCH_SUMS + i]


@helper
def sum_of_squares(values, sums):
    """Return the sum of squares of float32[n] in float64. sums: float64[16], overwritten.

    The square of value i is added to sum i & 15, and then the sums are added in order.
    """
    sums[:] = 0.0
    whole = values.size & ~15
    for start in range(0, whole, 16):
        part = values[start : start + 16]
        for i in range(16):
            x = np.float64(part[i])
            sums[i] += x * x
    for i in range(values.size - whole):
        x = np.float64(values[whole + i])
        sums[i] += x * x
    return _total(sums)


@helper
def _total(sums):
    total = 0.0
    for i in range(16):
        total += sums[i]
    return total


@helper
def sum_of_block_squares(values):
    """Like sum_of_squares, but for each SQUARES_BLOCK values apart: the sum of block b is added to sum b & 15, and so on."""
    sums, own = np.zeros(16), np.empty(16)
    for start in range(0, values.size, SQUARES_BLOCK):
        sums[start // SQUARES_BLOCK & 15] += sum_of_squares(values[start : start + SQUARES_BLOCK], own)
    return _total(sums)

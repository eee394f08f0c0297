"""Kernels of memory `adam`: a sketch of squared norms, the factored second moment of what arrived, and the step with it.

All sums are in a fixed order, so that ranks with other processors get the same bits.
"""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE, step_row
from ._intrinsics import bits_of, helper
from ._sums import LANES, SKETCH_ROOM, add_sketch, add_square_rows, end_sketch, sum8, sum_in_order

_SKIPPED = 64  # elements that a step leaves alone together


@kernel("void(Array(float32, 1, 'C', readonly=True), uint32, uint32, float32[::1])")
def random_sketch(values, low, high, sketch):
    """sketch[j] = sum of values[8 i + j] with random signs s_i.

    values: float32[d]; sketch: float32[8], overwritten. The signs are the same for the same key (low, high). The sketch is
    linear in the values, and the expectation of sum(sketch**2) over the keys is sum(values**2) (Alon, Matias and Szegedy, The
    space complexity of approximating the frequency moments, STOC 1996, section 2.2). 8 neighbors share a sign, since they go
    to different numbers.
    """
    sums = np.zeros(SKETCH_ROOM, np.float32)
    add_sketch(values, 0, values.size, low, high, sums)
    end_sketch(sums, values.size, sketch)


@kernel("void(Array(float32, 1, 'C', readonly=True), float32[::1], float32[::1])")
def square_sums(values, rows, columns):
    """rows, columns = the sums of squares of each row and of each column.

    values: float32[r * c], a matrix row by row; rows: float32[r] and columns: float32[c], overwritten.
    """
    columns[:] = 0
    add_square_rows(values, rows, columns, np.empty(2 * LANES, np.float32))


@helper
def _sum_over_squares(values, roots):
    """Return the sum of values / roots**2, both float32[n], the roots not zero."""
    total = np.float64(0)
    for i in range(values.size):
        total += np.float64(values[i]) / (np.float64(roots[i]) * np.float64(roots[i]))
    return total


@helper
def _spread_roots(moments, smoothing, roots):
    """roots = sqrt((moments / mean(moments) + smoothing) / (1 + smoothing)); 1 where all moments are zero.

    moments and roots: float32[n].
    """
    mean = np.float32(sum_in_order(moments) / max(moments.size, 1))
    for i in range(moments.size):
        relative = moments[i] / mean if mean > 0 else np.float32(1)
        roots[i] = np.sqrt((relative + smoothing) / (np.float32(1) + smoothing))


@helper
def _all_finite(values):
    for i in range(values.size):
        if not np.isfinite(values[i]):
            return False
    return True


@helper
def _largest(values):
    """The index of the first of the largest values; 0 if there are none."""
    found = 0
    for i in range(values.size):
        if values[i] > values[found]:
            found = i
    return found


@kernel(
    "void(Array(int64, 2, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True),"
    " float32, float32, float32[::1], boolean[::1], int64[::1], float64[::1])"
)
def update_moments(shapes, sums, squares, beta2, smoothing, states, finite, rows, relative_squares):
    """Update the second moments of all matrices that a vector consists of, and describe what has arrived.

    A matrix's state is its moment V, the weight of that, the learning rate, and the moments R of its rows and C of its columns:

        V, weight = beta2 * (V, weight) + (1 - beta2) * (square, 1);  R, C = beta2 * (R, C) + (1 - beta2) * (its sums)

    shapes: int64[m, 2], the rows and columns of each matrix; sums: float32, what `square_sums` gives for the matrices one after
    the other; squares: float32[m]; states: float32, one after the other, changed; finite: bool[m], whether all numbers of a
    state are finite, without which those of the matrix are of no use; rows: int64[m], the row with the largest sum of squares,
    or -1 if all are zero; relative_squares: float64[m], the mean over the matrix of s**2 / (the shares of its row and its
    column), if s**2 was the product of its sums by row and by column.
    """
    share = np.float32(1) - beta2
    at, state_start = 0, 0
    most = 0
    for i in range(shapes.shape[0]):
        most = max(most, shapes[i, 0] + shapes[i, 1])
    work = np.empty(most, np.float32)
    for i in range(shapes.shape[0]):
        height, width = shapes[i, 0], shapes[i, 1]
        own = sums[at : at + height + width]
        state = states[state_start : state_start + 3 + height + width]
        at += height + width
        state_start += 3 + height + width
        state[0] = beta2 * state[0] + share * squares[i]
        state[1] = beta2 * state[1] + share
        for j in range(own.size):
            state[3 + j] = beta2 * state[3 + j] + share * own[j]
        finite[i] = _all_finite(state)
        rows[i], relative_squares[i] = -1, 0
        total = sum_in_order(own[:height])
        if not finite[i] or total == 0:
            continue
        by_row, by_column = work[:height], work[height : height + width]
        _spread_roots(state[3 : 3 + height], smoothing, by_row)
        _spread_roots(state[3 + height :], smoothing, by_column)
        over = _sum_over_squares(own[:height], by_row) * (_sum_over_squares(own[height:], by_column) / total)
        relative_squares[i] = over / (height * width)
        rows[i] = _largest(own[:height])


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), Array(int64, 2, 'C', readonly=True), Array(int64, 1, 'C', readonly=True),"
    " int64[::1], float32[::1])"
)
def largest_in_rows(vector, shapes, rows, positions, values):
    """positions, values = the element of the largest magnitude in one row of each matrix that a vector consists of.

    vector: float32[d]; shapes: int64[m, 2]; rows: int64[m], -1 for none: then both are 0; positions: int64[m], in the matrix;
    values: float32[m].
    """
    start = 0
    for i in range(shapes.shape[0]):
        width = shapes[i, 1]
        positions[i], values[i] = 0, 0
        if rows[i] >= 0:
            row = vector[start + rows[i] * width : start + (rows[i] + 1) * width]
            found = 0
            for j in range(width):
                if abs(row[j]) > abs(row[found]):
                    found = j
            positions[i], values[i] = rows[i] * width + found, row[found]
        start += shapes[i, 0] * width


_SPARSE_VECTOR = (
    "Array(uint32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), Array(int64, 2, 'C', readonly=True)"
)


@kernel(f"void({_SPARSE_VECTOR}, Array(int64, 1, 'C', readonly=True), int64[::1], float32[::1])")
def largest_in_rows_at(at, vector, shapes, rows, positions, values):
    """`largest_in_rows` of a vector that is zero but for vector[i] at at[i]. at: uint32[n], ascending; vector: float32[n]."""
    start = 0
    for i in range(shapes.shape[0]):
        width = shapes[i, 1]
        positions[i], values[i] = 0, 0
        if rows[i] >= 0:
            first = start + rows[i] * width
            positions[i] = first - start
            j = np.searchsorted(at, np.uint32(first))
            while j < at.size and at[j] < first + width:
                if abs(vector[j]) > abs(values[i]):
                    positions[i], values[i] = np.int64(at[j]) - start, vector[j]
                j += 1
        start += shapes[i, 0] * width


@kernel(f"void({_SPARSE_VECTOR}, float32[::1])")
def square_sums_at(at, vector, shapes, sums):
    """`square_sums` of all matrices that a vector consists of, which is zero but for vector[i] at at[i]: the same bits.

    at: uint32[n], ascending; vector: float32[n]; shapes: int64[m, 2]; sums: float32, those of the first matrix's rows, then of
    its columns, and so on.
    """
    sums[:] = 0
    lanes, block = np.empty(LANES, np.float32), np.empty((4, LANES), np.float32)
    i, start, row_at = 0, 0, 0
    for m in range(shapes.shape[0]):
        height, width = shapes[m, 0], shapes[m, 1]
        whole, column_at = width & ~63, row_at + height
        while i < at.size and at[i] < start + height * width:
            row = (np.int64(at[i]) - start) // width
            first = start + row * width
            lanes[:] = 0
            while i < at.size and at[i] < first + whole:  # a block of 64 columns, as in _sums.add_square_rows
                begin = (np.int64(at[i]) - first) & ~63
                block[:] = 0
                while i < at.size and at[i] < first + begin + 64:
                    column = np.int64(at[i]) - first
                    square = vector[i] * vector[i]
                    sums[column_at + column] += square
                    block[column // LANES % 4, column % LANES] += square
                    i += 1
                for j in range(LANES):
                    lanes[j] += (block[0, j] + block[1, j]) + (block[2, j] + block[3, j])
            while i < at.size and at[i] < first + width:
                column = np.int64(at[i]) - first
                square = vector[i] * vector[i]
                sums[column_at + column] += square
                lanes[column % LANES] += square
                i += 1
            sums[row_at + row] = sum8(lanes)
        start += height * width
        row_at += height + width


@kernel("void(float32[::1], int64, float32, float64, float32, float32, float32, float32, float32[::1])")
def root_moments(state, rows, clipped, relative_square, kept, added, smoothing, clip, roots):
    """roots = the roots of a matrix's second moments, by row and then by column, whose products are those of its elements.

    state: float32[3 + rows + columns], see `update_moments`; clipped: what has become of each element since, a factor;
    kept, added: the parts of V that `update_moments` has kept of the earlier one and added, which changes by the square of that
    factor; relative_square: see there; clip: the largest root mean square of the update, above which the roots are larger in
    proportion; roots: float32[rows + columns]. The sum is made anew, since V has lost what was small beside a large `added`.
    """
    state[0] = kept + clipped * clipped * added
    root = np.sqrt(state[0] / state[1])
    update = np.float32(0)
    if root != 0:
        update = abs(clipped) * np.float32(np.sqrt(relative_square)) / root
    _spread_roots(state[3 : 3 + rows], smoothing, roots[:rows])
    _spread_roots(state[3 + rows :], smoothing, roots[rows:])
    excess = update / clip
    scale = root * (excess if excess > 1 else np.float32(1))
    for i in range(rows):
        roots[i] *= scale


@helper
def _are_zeros(values):
    """Whether all values are zeros, of either sign."""
    bits = np.uint32(0)
    for i in range(values.size):
        bits |= np.uint32(bits_of(values[i]) & MAGNITUDE)
    return bits == 0


@kernel(
    "void(float32[::1], Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True),"
    " Array(float32, 1, 'C', readonly=True), float32, float32, float32)"
)
def factored_step(parameters, gradient, by_row, by_column, eps, value, shrink):
    """p = shrink * p + value * g / (by_row[i] * by_column[j] + eps), for p[i, j] in row-major order.

    parameters, gradient: float32[rows * columns]; by_row: float32[rows]; by_column: float32[columns]; eps > 0, all others at
    least 0 where they are not `value`. Where there is nothing to do, parameters are not touched.
    """
    columns = by_column.size
    width = _SKIPPED if shrink == 1 else max(columns, 1)
    for row in range(by_row.size):
        for start in range(0, columns, width):
            first, last = row * columns + start, row * columns + min(start + width, columns)
            if shrink != 1 or not _are_zeros(gradient[first:last]):
                part = by_column[start : start + last - first]
                step_row(parameters[first:last], gradient[first:last], by_row[row], part, eps, value, shrink)

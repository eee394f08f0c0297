"""Positions in a table of rows: which rows they touch, and where they are in these.

Row x has the positions from x * width on. The touched rows, one after the other, form the compact domain: position
q * width + c is column c of touched row q.
"""

import numpy as np

from ._compile import kernel

_1 = np.uint64(1)


@kernel("int64(Array(uint32, 1, 'C', readonly=True), int64, uint32[::1], uint32[::1])")
def split_rows(indices, width, rows, compact):
    """Write the touched rows, whose number is returned, and each index's position in their compact domain.

    indices: uint32[k], strictly ascending; rows, compact: uint32[k], compact may be indices itself; width below 2**31.
    """
    w = np.uint64(width)
    n, end, before = np.uint64(0), np.uint64(0), np.uint64(0)  # before: elements of untouched rows ahead of the row
    for i in range(np.uint64(indices.size)):
        x = np.uint64(indices[i])
        if x >= end:
            row = x // w
            rows[n] = np.uint32(row)
            before = (row - n) * w
            end = (row + _1) * w
            n += _1
        compact[i] = np.uint32(x - before)
    return np.int64(n)


@kernel("boolean(Array(uint32, 1, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), int64, uint32[::1])")
def join_rows(rows, compact, width, out):
    """The inverse of split_rows: out gets the indices. Returns False unless every row has one of them.

    rows: uint32[r], r >= 1; compact: uint32[k], k >= 1, strictly ascending, below r * width < 2**63; out: uint32[k], may be
    compact itself.
    """
    w = np.uint64(width)
    if compact[0] >= w:
        return False
    q, end, shift = np.uint64(0), w, np.uint64(rows[0]) * w
    for i in range(np.uint64(compact.size)):
        x = np.uint64(compact[i])
        if x >= end:
            q += _1
            end += w
            if x >= end:
                return False
            shift = (np.uint64(rows[q]) - q) * w  # wraps around where rows do not ascend, and so does the sum
        out[i] = np.uint32(x + shift)
    return q + _1 == np.uint64(rows.size)


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, uint32[::1])")
def whole_rows(rows, width, out):
    """Write all positions of these rows: out, uint32[k], where k is len(rows) * width or, if the last row is short, less."""
    w = np.uint64(width)
    at = np.uint64(0)
    for q in range(np.uint64(rows.size)):
        first = np.uint32(np.uint64(rows[q]) * w)
        part = out[at : at + w]
        for c in range(part.size):
            part[c] = first + np.uint32(c)
        at += w


@kernel(
    "void(float32[::1], Array(uint32, 1, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), int64,"
    " Array(uint32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32)"
)
def add_compact(out, rows, own, width, compact, values, weight):
    """Add weight * values at the positions `compact` in the domain of the rows `own`, in the domain of more rows.

    out: float32[u * width]; rows: uint32[u], ascending; own: uint32[r], some of these; compact: uint32[k], from split_rows;
    values: float32[k].
    """
    w = np.uint64(width)
    q, i, k = np.uint64(0), np.uint64(0), np.uint64(compact.size)
    for j in range(np.uint64(own.size)):
        while rows[q] < own[j]:
            q += _1
        first, end = j * w, (j + _1) * w
        if i + w <= k and compact[i] == first and np.uint64(compact[i + w - _1]) == end - _1:
            part, more = out[q * w : q * w + w], values[i : i + w]
            for c in range(part.size):
                part[c] += weight * more[c]
            i += w
            continue
        while i < k and compact[i] < end:
            out[q * w + (np.uint64(compact[i]) - first)] += weight * values[i]
            i += _1
        q += _1


@kernel("void(float32[:, ::1], Array(int64, 1, 'C', readonly=True), Array(float32, 2, 'C', readonly=True))")
def add_rows(out, slots, values):
    """out[slots[i]] += values[i], in the order of i. out: float32[r, width]; slots: int64[n], from 0 and below r; values:
    float32[n, width]."""
    for i in range(values.shape[0]):
        row, more = out[slots[i]], values[i]
        for c in range(more.size):
            row[c] += more[c]

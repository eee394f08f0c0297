"""Piecewise polynomials through sorted values: knots, least squares, and evaluation.

Nothing here depends on a library's sine, exponential or matrix product, nor on the order in which a CPU adds up: the same
values give the same bytes, and the same bytes the same values, on every machine.
"""

import numpy as np

from ._compile import kernel
from ._intrinsics import helper

_BLOCK = 256
_LANES = 8


@helper
def _chord(values, start, end, least):
    """Return (position, distance) of the value furthest from the line through values[start] and values[end - 1].

    Only values with at least `least` values on either side count; distance -1 if there is none.
    """
    first = np.float64(values[start])
    slope = (np.float64(values[end - 1]) - first) / max(end - 1 - start, 1)
    distance, position = -1.0, start
    for i in range(start + least, end - least + 1):
        off = abs(np.float64(values[i]) - (first + slope * (i - start)))
        if off > distance:
            distance, position = off, i
    return position, distance


@kernel("int64(Array(float32, 1, 'C', readonly=True), int64, int64[::1])")
def find_knots(values, least, ends):
    """Split ascending values into at most ends.size segments of at least `least` values.

    A segment is split where it is furthest from its chord (Lemma 10 of DeepReduce). The next one to be split is the worst by
    the chord's distance and the number of values. Writes where each segment ends (exclusive), ascending, and returns their
    number.
    """
    n = values.size
    cuts = np.zeros(ends.size, np.int64)
    badness = np.zeros(ends.size)
    ends[0] = n
    position, distance = _chord(values, 0, n, least)
    cuts[0], badness[0] = position, distance * distance * n if distance > 0 else -1.0
    count = 1
    while count < ends.size:
        worst = np.argmax(badness[:count])
        if badness[worst] <= 0:
            break
        for s in range(count, worst, -1):
            ends[s], cuts[s], badness[s] = ends[s - 1], cuts[s - 1], badness[s - 1]
        ends[worst] = cuts[worst]
        count += 1
        for s in range(worst, worst + 2):
            start = ends[s - 1] if s else 0
            position, distance = _chord(values, start, ends[s], least)
            cuts[s], badness[s] = position, distance * distance * (ends[s] - start) if distance > 0 else -1.0
    return count


@helper
def _recurrence(j, n):
    """Return b[j] of the polynomials that are orthogonal on n evenly spaced points: P[j + 1] = x P[j] - b[j] P[j - 1]."""
    span = np.float64(max(n - 1, 1))
    return (
        np.float64(j * j) * (np.float64(n) * np.float64(n) - np.float64(j * j)) / (np.float64(4 * j * j - 1) * (span * span))
    )


@helper
def _fit(values, coefficients):
    """Fit by least squares. values: float32[n], ascending; coefficients: float32[degree + 1], written."""
    n = values.size
    low = np.float64(values[0])
    span = np.float64(values[n - 1]) - low
    terms = min(coefficients.size, n)
    coefficients[:] = np.float32(0)
    if span == 0:
        return
    step = 2.0 / max(n - 1, 1)
    sums = np.zeros((terms, _LANES))
    x, y = np.zeros(_BLOCK), np.zeros(_BLOCK)
    now, before = np.zeros(_BLOCK), np.zeros(_BLOCK)
    for start in range(0, n, _BLOCK):
        part = values[start : min(n, start + _BLOCK)]
        for i in range(part.size):
            x[i] = (start + i) * step - 1.0
            y[i] = (np.float64(part[i]) - low) / span
        for i in range(part.size, _BLOCK):
            y[i] = 0.0
        now[:] = 1.0
        before[:] = 0.0
        for j in range(terms):
            total = sums[j]
            for i in range(0, _BLOCK, _LANES):
                for lane in range(_LANES):
                    total[lane] += now[i + lane] * y[i + lane]
            b = _recurrence(j, n)
            for i in range(_BLOCK):
                following = x[i] * now[i] - b * before[i]
                before[i] = now[i]
                now[i] = following
    square = np.float64(n)  # the sum of P[j] ** 2 over the points
    for j in range(terms):
        if j:
            square *= _recurrence(j, n)
        total = 0.0
        for lane in range(_LANES):
            total += sums[j, lane]
        coefficients[j] = np.float32(total / square)


@kernel("void(Array(float32, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), float32[:, ::1])")
def fit_segments(values, ends, coefficients):
    """Fit a polynomial to each segment.

    values: float32[n], ascending; ends: int64[s], ascending, the last is n; coefficients: float32[s, degree + 1], written.
    """
    start = 0
    for s in range(ends.size):
        _fit(values[start : ends[s]], coefficients[s])
        start = ends[s]


@helper
def _evaluate(coefficients, b, low, high, negative, out):
    """Evaluate by Clenshaw's recurrence. b: float64[degree + 2]."""
    n = out.size
    step = 2.0 / max(n - 1, 1)
    bottom, span = np.float64(low), np.float64(high) - np.float64(low)
    x, now, before = np.zeros(_BLOCK), np.zeros(_BLOCK), np.zeros(_BLOCK)
    for start in range(0, n, _BLOCK):
        part = out[start : min(n, start + _BLOCK)]
        for i in range(_BLOCK):
            x[i] = (start + i) * step - 1.0
            now[i] = 0.0
            before[i] = 0.0
        for j in range(coefficients.size - 1, -1, -1):
            c = np.float64(coefficients[j])
            for i in range(_BLOCK):
                following = x[i] * now[i] + c - b[j + 1] * before[i]
                before[i] = now[i]
                now[i] = following
        for i in range(part.size):
            value = np.float32(bottom + span * min(max(now[i], 0.0), 1.0))
            part[i] = -value if negative else value


@kernel(
    "void(Array(float32, 2, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), "
    "Array(int64, 1, 'C', readonly=True), boolean, float32[::1])"
)
def evaluate_segments(coefficients, edges, ends, negative, out):
    """The inverse of fit_segments, clamped to the segments' values.

    coefficients: float32[s, degree + 1], finite; edges: float32[s + 1], ascending, finite: segment i is between edges[i] and
    edges[i + 1]; ends: int64[s], ascending, the last is out.size; out: float32[n], written, negated if asked.
    """
    b = np.zeros(coefficients.shape[1] + 1)
    start = 0
    for s in range(ends.size):
        for j in range(1, b.size):
            b[j] = _recurrence(j, ends[s] - start)
        _evaluate(coefficients[s], b, edges[s], edges[s + 1], negative, out[start : ends[s]])
        start = ends[s]

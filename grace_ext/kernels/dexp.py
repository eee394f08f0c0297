"""Two exponentials through sorted values: least squares, and evaluation."""

import math

import numpy as np

from ._compile import kernel
from ._intrinsics import helper

_BLOCK = 256
_LANES = 8
_TERMS = np.array([1.0 / math.factorial(i) for i in range(14)])
_GOOD = 0.2**2  # a squared error, relative to the squared values, below which no other rates are tried
_LARGEST = 1000.0  # the largest amplitude; beyond it the two exponentials cancel, for which float32 is too coarse


@helper
def _exp(t):
    """Return e**t for t <= 0, at least e**-700.

    The C library's exp rounds differently from one machine to the next, and so would what receivers decode. These are
    additions and multiplications only: Taylor's series of t / 1024, squared ten times; accurate to 1e-12 down to e**-100.
    """
    t = max(t, -700.0) / 1024.0
    e = _TERMS[13]
    for i in range(12, -1, -1):
        e = e * t + _TERMS[i]
    for _ in range(10):
        e *= e
    return e


@helper
def _prepare(rate, n, table):
    """Tabulate the first block of an exponential that decays from one end of n points. Returns its rate per point."""
    slope = abs(np.float64(rate)) / max(n - 1, 1)
    for i in range(min(n, _BLOCK)):
        table[i] = _exp(-(slope * i))
    return slope


@helper
def _exponential(rate, slope, table, n, start, out):
    """out[i] = the exponential at point start + i of n, 1 where it is largest. out: float64[_BLOCK]."""
    block = -1
    factor = 0.0
    for i in range(min(n - start, _BLOCK)):
        away = n - 1 - (start + i) if rate > 0 else start + i
        if away // _BLOCK != block:
            block = away // _BLOCK
            factor = _exp(-(slope * (block * _BLOCK)))
        out[i] = factor * table[away - block * _BLOCK]


@helper
def _sum(x, y):
    """Return the sum of x * y, added in an order that does not depend on the CPU. Both float64[_BLOCK]."""
    lanes = np.zeros(_LANES)
    for i in range(0, _BLOCK, _LANES):
        for lane in range(_LANES):
            lanes[lane] += x[i + lane] * y[i + lane]
    total = 0.0
    for lane in range(_LANES):
        total += lanes[lane]
    return total


@helper
def _rates(values, scale):
    """Return the two rates, by regression on an integral equation; (0, 0) if there is no real solution.

    The equation is y = -bd SS + (b + d) S + linear, with S and SS the first and second integral of y, by trapezoids.
    """
    n = values.size
    h = 1.0 / (n - 1)
    # The constant and the linear term are projected out first; then the 4 x 4 system is one of 2 x 2.
    mean, slope = np.zeros(3), np.zeros(3)
    gram = np.zeros((3, 3))
    z = np.zeros(3)  # SS, S, y
    squares = np.float64(n) * (np.float64(n) + 1.0) / (12.0 * (np.float64(n) - 1.0))  # the sum of (x - 1/2)**2
    for sweep in range(2):
        z[0] = z[1] = 0.0
        z[2] = values[0] * scale
        for i in range(n):
            if i:
                y = values[i] * scale
                s = z[1] + (y + z[2]) * (0.5 * h)
                z[0] += (s + z[1]) * (0.5 * h)
                z[1], z[2] = s, y
            x = i * h - 0.5
            if sweep == 0:
                for j in range(3):
                    mean[j] += z[j]
                    slope[j] += x * z[j]
            else:
                p = z[0] - mean[0] - slope[0] * x
                q = z[1] - mean[1] - slope[1] * x
                r = z[2] - mean[2] - slope[2] * x
                gram[0, 0] += p * p
                gram[0, 1] += p * q
                gram[1, 1] += q * q
                gram[0, 2] += p * r
                gram[1, 2] += q * r
        if sweep == 0:
            for j in range(3):
                mean[j] /= n
                slope[j] /= squares
    determinant = gram[0, 0] * gram[1, 1] - gram[0, 1] * gram[0, 1]
    if determinant <= 1e-14 * gram[0, 0] * gram[1, 1]:
        return 0.0, 0.0
    product = (gram[0, 2] * gram[1, 1] - gram[1, 2] * gram[0, 1]) / determinant
    total = (gram[0, 0] * gram[1, 2] - gram[0, 1] * gram[0, 2]) / determinant
    under = total * total + 4.0 * product
    if under < 0:
        return 0.0, 0.0
    root = math.sqrt(under)
    return 0.5 * (total + root), 0.5 * (total - root)


@helper
def _amplitudes(values, scale, b, d, work):
    """Return the least squares for given rates: (a, c, squared error, sum of the squares).

    Of two exponentials that cannot be told apart, only the first is used.
    """
    n = values.size
    first, second, y, table_b, table_d = work
    slope_b, slope_d = _prepare(b, n, table_b), _prepare(d, n, table_d)
    bb, bd, dd, by, dy, yy = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, n, _BLOCK):
        part = values[start : min(n, start + _BLOCK)]
        for i in range(part.size):
            y[i] = part[i] * scale
        for i in range(part.size, _BLOCK):
            first[i] = second[i] = y[i] = 0.0
        _exponential(b, slope_b, table_b, n, start, first)
        _exponential(d, slope_d, table_d, n, start, second)
        bb += _sum(first, first)
        bd += _sum(first, second)
        dd += _sum(second, second)
        by += _sum(first, y)
        dy += _sum(second, y)
        yy += _sum(y, y)
    determinant = bb * dd - bd * bd
    if determinant > 1e-12 * bb * dd:
        a = (by * dd - dy * bd) / determinant
        c = (dy * bb - by * bd) / determinant
        if max(abs(a), abs(c)) <= _LARGEST:
            return a, c, yy - a * by - c * dy, yy
    a = by / bb
    return a, 0.0, yy - a * by, yy


@kernel("void(Array(float32, 1, 'C', readonly=True), float32[::1])")
def fit_exponentials(values, parameters):
    """Fit a e**(b x) + c e**(d x) to ascending magnitudes divided by the last one, at x from 0 to 1.

    values: float32[n], n >= 1; parameters: float32[4], written: b, d, a, c, where a and c are the terms' largest values on
    the n points. Where the regression finds no rates, or bad ones, a few fixed pairs are tried as well.
    """
    n = values.size
    parameters[:] = np.float32(0)
    if values[n - 1] == 0:
        return
    scale = 1.0 / np.float64(values[n - 1])
    work = np.zeros((5, _BLOCK))
    rates = np.zeros((8, 2))
    if n > 2:
        rates[0] = _rates(values, scale)  # (0, 0), a constant, if it fails
    rates[1] = 0.0625, -0.0625  # nearly a line
    for i in range(2, 7):
        rates[i] = 8.0 ** (i - 1), 0.0
    rates[7] = 40.0 * n, 0.0  # only the largest value is above the others
    best = np.inf
    for i in range(8):
        b, d = np.float32(rates[i, 0]), np.float32(rates[i, 1])
        if not (abs(b) < np.float32(1e9) and abs(d) < np.float32(1e9)):
            continue
        a, c, error, total = _amplitudes(values, scale, b, d, work)
        if error < best:
            best = error
            parameters[0], parameters[1], parameters[2], parameters[3] = b, d, np.float32(a), np.float32(c)
        if best <= _GOOD * total:
            break


@kernel("void(Array(float32, 1, 'C', readonly=True), float32, float32, boolean, float32[::1])")
def evaluate_exponentials(parameters, low, high, negative, out):
    """The inverse of fit_exponentials, clamped to low and high (0 <= low <= high, finite), negated if asked.

    parameters: float32[4], finite; out: float32[n], n >= 1, written.
    """
    n = out.size
    work = np.zeros((4, _BLOCK))
    first, second, table_b, table_d = work
    b, d, a, c = parameters[0], parameters[1], np.float64(parameters[2]), np.float64(parameters[3])
    slope_b, slope_d = _prepare(b, n, table_b), _prepare(d, n, table_d)
    bottom, top = np.float64(low), np.float64(high)
    for start in range(0, n, _BLOCK):
        part = out[start : min(n, start + _BLOCK)]
        _exponential(b, slope_b, table_b, n, start, first)
        _exponential(d, slope_d, table_d, n, start, second)
        for i in range(part.size):
            value = np.float32(min(max(top * (a * first[i] + c * second[i]), bottom), top))
            part[i] = -value if negative else value

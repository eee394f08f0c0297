"""Slow, readable twins of the kernels behind polyfit, dexp and sketchml."""

import numpy as np


def b(j, n):
    """The recurrence's factor for n points, every operation in float64 (a Python float)."""
    s = float(max(n - 1, 1))
    return float(j * j) * (float(n) * float(n) - float(j * j)) / (float(4 * j * j - 1) * (s * s))


def polynomial(coefficients, n, i):
    """The value at point i of n: Clenshaw's recurrence."""
    x = i * (2.0 / max(n - 1, 1)) - 1.0
    u1 = u2 = 0.0
    for j in reversed(range(len(coefficients))):
        u1, u2 = x * u1 + float(coefficients[j]) - b(j + 1, n) * u2, u1
    return u1


def segment(coefficients, low, high, n):
    """n values between the edges, as Python floats that are float32."""
    low, high = float(low), float(high)
    return [float(np.float32(low + (high - low) * min(max(polynomial(coefficients, n, i), 0.0), 1.0))) for i in range(n)]


def chord(values, start, end, least):
    """(position, distance) of the value furthest from the chord, -1 if no place is allowed."""
    first, last = float(values[start]), float(values[end - 1])
    slope = (last - first) / max(end - 1 - start, 1)
    return max(((abs(float(values[i]) - (first + slope * (i - start))), -i) for i in range(start + least, end - least + 1)),
               default=(-1.0, -start))


def knots(values, least, most):
    """The ends of the segments: the worst one is split until there are `most`."""
    found = [0, len(values)]
    while len(found) <= most:
        worst, cut = 0.0, None
        for start, end in zip(found, found[1:], strict=False):
            distance, minus_position = chord(values, start, end, least)
            if distance > 0 and distance * distance * (end - start) > worst:
                worst, cut = distance * distance * (end - start), -minus_position
        if cut is None:
            break
        found = sorted([*found, cut])
    return found[1:]


def least_squares(values, degree):
    """What numpy's Legendre fit of the scaled values gives at the points: float64[n]."""
    n = len(values)
    y = np.asarray(values, np.float64)
    scaled = (y - y[0]) / ((y[-1] - y[0]) or 1.0)
    x = np.linspace(-1, 1, n) if n > 1 else np.zeros(1)
    fitted = np.polynomial.legendre.Legendre.fit(x, scaled, min(degree, n - 1), domain=[-1, 1])(x)
    return y[0] + (y[-1] - y[0]) * np.clip(fitted, 0, 1)

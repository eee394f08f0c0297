"""Slow, readable reference implementations of the kernels behind polyfit, dexp and sketchml."""

import math

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
    return max(
        ((abs(float(values[i]) - (first + slope * (i - start))), -i) for i in range(start + least, end - least + 1)),
        default=(-1.0, -start),
    )


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


# Exponentials


def exp(t):
    """Taylor's series of t / 1024, squared ten times, in float64."""
    u = max(t, -700.0) / 1024.0
    e = 1.0 / math.factorial(13)
    for j in reversed(range(13)):
        e = e * u + 1.0 / math.factorial(j)
    for _ in range(10):
        e *= e
    return e


def decay(rate, n, i):
    """e**(rate x) at point i of n, divided by its largest value on the n points."""
    m = n - 1 - i if rate > 0 else i
    s = abs(rate) / max(n - 1, 1)
    return exp(-(s * (256 * (m // 256)))) * exp(-(s * (m % 256)))


def exponentials(fit, low, high, n):
    """n values between the edges, as Python floats that are float32."""
    b, d, a, c = map(float, fit)
    low, high = float(low), float(high)
    values = [high * (a * decay(b, n, i) + c * decay(d, n, i)) for i in range(n)]
    return [float(np.float32(min(max(v, low), high))) for v in values]


def rates(values):
    """(b, d) of the integral equation's regression with numpy, None if they are complex. values: float[n], n > 3."""
    y = np.asarray(values, np.float64)
    x, h = np.linspace(0, 1, y.size), 1 / (y.size - 1)

    def integral(f):
        return np.concatenate([[0], np.cumsum((f[1:] + f[:-1]) * 0.5 * h)])

    once = integral(y)
    p = np.linalg.lstsq(np.stack([integral(once), once, x, np.ones(y.size)], 1), y, rcond=None)[0]
    under = p[1] ** 2 + 4 * p[0]
    return None if under < 0 else ((p[1] + under**0.5) / 2, (p[1] - under**0.5) / 2)


def amplitudes(values, b, d):
    """Least squares for given rates: the fitted values float64[n]."""
    basis = np.array([[decay(b, len(values), i), decay(d, len(values), i)] for i in range(len(values))])
    return basis @ np.linalg.lstsq(basis, np.asarray(values, np.float64), rcond=None)[0]


# Quantile sketch


def sketch(values, most, bins):
    """(levels, means as float32): buckets ascending from 0."""
    bits = [int(x) for x in values.view(np.uint32)]
    magnitudes = [x & 0x7FFFFFFF for x in bits]
    largest = max(magnitudes)
    floor = max(min((m for m in magnitudes if m), default=0), largest - (32 << 23))
    shift = 0
    while largest - floor >> shift >= bins:
        shift += 1
    found = [
        (0 if m == 0 else (1 + (max(m - floor, 0) >> shift)) * (-1 if x >> 31 else 1))
        for x, m in zip(bits, magnitudes, strict=True)
    ]
    groups = [sorted(b for b in found if b < 0), [b for b in found if b == 0], sorted(b for b in found if b > 0)]
    parts = most - bool(groups[1])
    if groups[0]:
        nonzero = len(groups[0]) + len(groups[2])
        below = min(max(math.floor(parts * len(groups[0]) / nonzero + 0.5), 1), parts - bool(groups[2]))
    else:
        below = 0
    level_of, level = {}, 0
    for group, share in zip(groups, (below, 1, parts - below), strict=True):
        for part in equal_parts(group, share):
            level_of.update((b, level) for b in part)
            level += 1
    levels = [level_of[b] for b in found]
    means = [
        math.fsum(float(v) for v, at in zip(values, levels, strict=True) if at == i) / levels.count(i) for i in range(level)
    ]
    return levels, np.array(means, np.float32)


def equal_parts(group, parts):
    """Split sorted bin numbers, with repetitions, into at most `parts` sets of whole bins."""
    done, held, size, left = [], [], 0, len(group)
    for b in sorted(set(group)):
        count = group.count(b)
        share = -(-(left + size) // parts)
        if held and parts > 1 and (size >= share or count >= share):
            done.append(held)
            held, size, parts = [], 0, parts - 1
        held.append(b)
        size += count
        left -= count
    return [*done, held] if held else done

"""The second decoder's inverse DCT, from docs/container-format.md: recursive, in float32, a chunk at a time."""

import math

import numpy as np


def inverse(coefficients):
    """The unnormalised inverse of Lee's transform along the first axis: float32[n, w]."""
    n = len(coefficients)
    if n == 1:
        return coefficients
    odd = coefficients[1::2].copy()
    odd[1:] += coefficients[1:-1:2]
    factors = np.array([1 / (2 * math.cos(math.pi * (2 * i + 1) / (2 * n))) for i in range(n // 2)], np.float32)
    front, back = inverse(coefficients[0::2]), inverse(odd) * factors[:, None]
    return np.concatenate([front + back, (front - back)[::-1]])


def along(rows):
    """Every row of float32[m, n]."""
    n = rows.shape[1]
    first = np.float32(1 / math.sqrt(n))
    scales = np.full(n, first * np.float32(1.4142135), np.float32)
    scales[0] = first
    return inverse(np.ascontiguousarray((rows * scales).T)).T


def undo(parameters, coefficients):
    """float32[domain] -> float32[domain], the padded gradient."""
    n = 1 << parameters[0]
    if parameters[1] == 1:
        return along(coefficients.reshape(-1, n)).reshape(-1)
    squares = [along(along(square).T).T for square in coefficients.reshape(-1, n, n)]
    return np.array(squares, np.float32).reshape(-1)


def domain(parameters, d):
    chunk = (1 << parameters[0]) ** parameters[1]
    return math.ceil(d / chunk) * chunk


TRANSFORM = {1: (domain, undo)}

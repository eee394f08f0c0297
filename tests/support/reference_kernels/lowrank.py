"""Slow reference implementations of the low-rank kernels, and PowerSGD of all ranks in one place with numpy's QR in float64."""

import numpy as np

WORD = 0xFFFFFFFF


def random32(i, low, high):
    """As in kernels/_helpers.py, with Python's integers."""
    x = (i * 0x9E3779B1 & WORD) ^ low
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x + high) & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def draw(n, first, low, high):
    """float64[n]: each the sum of four 16-bit numbers, less the mean of such sums."""
    counters = [2 * (first + k) & WORD for k in range(n)]
    pairs = [(random32(i, low, high), random32(i + 1, low, high)) for i in counters]
    return np.array([(x & 0xFFFF) + (x >> 16) + (y & 0xFFFF) + (y >> 16) - 131070.0 for x, y in pairs])


def dot(a, b):
    """Four partial sums, of every fourth product each; what is left over goes to the first."""
    sums = [0.0] * 4
    whole = len(a) // 4 * 4
    for k, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        sums[k % 4 if k < whole else 0] += x * y
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


def orthonormalize(rows, low, high):
    r, n = rows.shape
    work = np.zeros((r, n))
    for i in range(r):
        row = rows[i].astype(np.float64)
        for attempt in range(5):
            before = dot(row, row)
            for _ in range(2):
                for j in range(i):
                    row = row - dot(work[j], row) * work[j]
            after = dot(row, row)
            if after > 1e-24 * before:
                break
            row = draw(n, (attempt * r + i) * n, low, high)
        work[i] = row * (1 / np.sqrt(after))
    return work.astype(np.float32)


def expand(pt, qt):
    """P·Qᵀ in float32, summed from 0 over the rank in ascending order."""
    total = np.zeros((pt.shape[1], qt.shape[1]), np.float32)
    for p, q in zip(pt, qt, strict=True):
        total = total + p[:, None] * q[None, :]
    return total


class PowerSGD:
    """One matrix on all ranks, in float64: what the exchange should come to up to rounding. q: what a step begins with."""

    def __init__(self, shape, ranks, feedback=True, iterations=1):
        self.iterations = iterations
        self.residuals = [np.zeros(shape) for _ in range(ranks)]
        self.feedback, self.q = feedback, None

    def step(self, gradients):
        """The average that all ranks get. gradients: a matrix a rank."""
        given = [g + e for g, e in zip(gradients, self.residuals, strict=True)]
        for _ in range(self.iterations):
            basis = np.linalg.qr(self.q)[0]
            p = np.linalg.qr(sum(m @ basis for m in given))[0]
            self.q = sum(m.T @ p for m in given) / len(given)
        average = p @ self.q.T
        if self.feedback:
            self.residuals = [m - p @ (p.T @ m) for m in given]
        return average

"""The step of LocalAdamW, by its formula."""

import numpy as np


def local_adamw_step(
    parameters, gradient, first, average, by_row, by_column, share1, share, share2, square, unbias2, eps, value, shrink
):
    """What grace_ext.kernels.local_adamw.local_adamw_step does, in float64."""
    g, m, a, r, q, p = (one.astype(np.float64) for one in (gradient, first, average, by_row, by_column, parameters))
    m += share1 * (g - m)
    a += share * (g - a)
    squares = square * a.reshape(r.size, -1) ** 2
    r += share2 * (squares.mean(1) - r)
    q += share2 * ((squares.mean(0) if q.size == squares.shape[1] else squares.mean()) - q)
    moments = np.broadcast_to(unbias2 * np.outer(r, q) / r.mean(), squares.shape)
    p = shrink * p + value * m / (np.sqrt(moments).reshape(-1) + eps)
    for own, changed in zip((first, average, by_row, by_column, parameters), (m, a, r, q, p), strict=True):
        own[:] = changed

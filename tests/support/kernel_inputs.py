"""Inputs of the quantizers' kernels."""

import numpy as np

KEY = (0x12345678, 0x9ABCDEF0)


def qsgd_values(kind, k):
    values = np.random.default_rng(k).standard_normal(k).astype(np.float32)
    if kind == "huge":
        values = np.clip(values, -3, 3) * np.float32(1e38)
        values[:2] = np.array([3.4028235e38, -3.4028235e38], np.float32)[:k]
    elif kind == "tiny":  # norms around the smallest that is not sent as zero, and subnormals
        values = (np.sign(values) * np.float32(2.0) ** np.random.default_rng(1).integers(-149, -110, k)).astype(np.float32)
    elif kind == "zeros":
        values[:] = 0
    elif kind == "equal":
        values[:] = -0.375
    return values


def ascending(d, k, seed=0):
    """uint32[k], strictly ascending, below d."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(d, k, replace=False)).astype(np.uint32)


KEYS = tuple(map(np.uint32, KEY))


KINDS = ["normal", "huge", "tiny", "zeros", "equal"]


SIZES = (1, 7, 15, 16, 17, 33, 100, 513, 700)


def buckets(k):
    """Sizes to cut k values into: the whole, and pieces with and without a rest."""
    return sorted({k, 8, 16, 24, 64, 512} if k > 8 else {k})

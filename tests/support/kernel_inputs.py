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

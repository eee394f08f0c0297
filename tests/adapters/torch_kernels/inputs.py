"""What all kernels are tried on: float32[d] of each kind, in sizes around those of the kernels' blocks."""

import numpy as np
import torch

from grace_ext._util.rng import Stream

KINDS = ("normal", "ties", "denormal", "huge", "zeros", "equal", "clustered")
STREAM = Stream(7, "bucket", 3, 1)


def vector(kind: str, d: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, d])
    values = rng.standard_normal(d).astype(np.float32)
    if kind == "ties":
        values = np.round(values * 2) / 2
    elif kind == "denormal":
        values *= np.float32(1e-38)
        values[::2] *= np.float32(1e-5)
    elif kind == "huge":
        values = np.clip(values, -3, 3) * np.float32(5e37)
    elif kind == "zeros":
        values[:] = 0
        values[::3] = -0.0
    elif kind == "equal":
        values[:] = -0.375
    elif kind == "clustered":  # one block has nearly all that is large
        values[: d // 8] *= 100
    return values.astype(np.float32)


def with_special(values: np.ndarray, special: float) -> np.ndarray:
    """The same with one value that is not finite, if there is any."""
    values = values.copy()
    values[values.size // 2 : values.size // 2 + 1] = special
    return values


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy())


def same(tensor: torch.Tensor, array: np.ndarray) -> bool:
    return tensor.numpy().tobytes() == array.tobytes()

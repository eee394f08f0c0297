"""Gradients into a bucket's vector: the PyTorch adapters share it."""

import numpy as np
import torch


def copy_in(out, gradients: list, sizes, scale: float = 1.0) -> None:
    """Copy gradients, one after the other, to out (float32[size], numpy or torch), times scale. One that is None is zero.

    sizes: their numbers of elements.
    """
    flat = torch.from_numpy(out) if isinstance(out, np.ndarray) else out
    for part, gradient in zip(flat.split(list(sizes)), gradients, strict=True):
        if gradient is None:
            part.zero_()
        else:
            gradient = gradient.detach()
            part.view(gradient.shape).copy_(gradient.to_dense() if gradient.is_sparse else gradient)
    if scale != 1.0:
        flat.mul_(scale)

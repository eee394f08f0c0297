"""Cosine transforms of chunks where the gradient is, by kernels."""

import torch

from grace_ext.transforms.dct import DCT

from .kernels import dct


def fits(transform: tuple[int, bytes]) -> bool:
    """Whether it can be inverted here. transform: (id, parameters)."""
    return transform[0] == DCT.id


def forward(dense: torch.Tensor, transform: DCT) -> torch.Tensor:
    """The coefficients of float32[d], filled up to whole chunks; NaN among them if an element is not finite."""
    size = transform.domain(transform.parameters(), dense.numel())
    return dct.transform(dense, size, transform.size, transform.dims, inverse=False)


def inverse(coefficients: torch.Tensor, parameters: bytes) -> torch.Tensor:
    """What float32[domain] are the coefficients of; parameters: checked ones of the transform."""
    return dct.transform(coefficients, len(coefficients), 1 << parameters[0], parameters[1], inverse=True)

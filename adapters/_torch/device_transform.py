"""Cosine transforms of chunks where the gradient is, by torch operations: each rounds as the host's kernel does.

They are the steps of grace_ext/kernels/dct.py, each for all chunks at once: sums, differences and products of two tensors, never
fused. See there for the source.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch

from grace_ext.transforms.dct import DCT, LARGEST, factors

from .mailbox import to_device


def fits(transform: tuple[int, bytes]) -> bool:
    """Whether it can be inverted here. transform: (id, parameters)."""
    return transform[0] == DCT.id


def forward(dense: torch.Tensor, transform: DCT) -> torch.Tensor:
    """The coefficients of float32[d], filled up to whole chunks; NaN among them if an element is not finite."""
    d, limit = dense.numel(), float(LARGEST)
    padded = torch.zeros(transform.domain(transform.parameters(), d), dtype=torch.float32, device=dense.device)
    padded[:d] = torch.where(torch.isfinite(dense), dense.clamp(-limit, limit), torch.nan)
    return _along_axes(padded, transform.size, transform.dims, _forward)


def inverse(coefficients: torch.Tensor, parameters: bytes) -> torch.Tensor:
    """What float32[domain] are the coefficients of; parameters: checked ones of the transform."""
    return _along_axes(coefficients, 1 << parameters[0], parameters[1], _inverse)


def _along_axes(flat: torch.Tensor, n: int, dims: int, function: Callable) -> torch.Tensor:
    factor, scale = _factors(n, str(flat.device))
    if dims == 1:
        return function(flat.view(-1, n), factor, scale).reshape(-1)
    chunks = flat.view(-1, n, n)
    rows = function(chunks.reshape(-1, n), factor, scale).view(-1, n, n).transpose(1, 2)
    return function(rows.reshape(-1, n), factor, scale).view(-1, n, n).transpose(1, 2).reshape(-1)


@functools.lru_cache(maxsize=16)
def _factors(n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the differences, and those of the n coefficients of a row."""
    factor = factors(n)
    scale = np.full(n, np.float32(factor[0] * np.float32(1.4142135)), np.float32)
    scale[0] = factor[0]
    return to_device(factor, device), to_device(scale, device)


def _forward(x: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The DCT-II of each row of float32[m, n]."""
    rows, n = x.shape
    m = n
    while m > 1:
        half = m // 2
        pairs = x.view(rows, n // m, m)
        a, b = pairs[..., :half], pairs[..., half:].flip(-1)
        x = torch.stack([a + b, (a - b) * factor[half:m]], dim=-2)
        m = half
    m = 2
    while m <= n:
        parts = x.reshape(rows, n // m, 2, m // 2)
        even, odd = parts[..., 0, :], parts[..., 1, :]
        odd = torch.cat([odd[..., :-1] + odd[..., 1:], odd[..., -1:]], dim=-1)
        x = torch.stack([even, odd], dim=-1)
        m *= 2
    return x.reshape(rows, n) * scale


def _inverse(x: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse of _forward: the transposed steps in reverse order."""
    rows, n = x.shape
    x, m = x * scale, n
    while m > 1:
        pairs = x.reshape(rows, n // m, m // 2, 2)
        even, odd = pairs[..., 0], pairs[..., 1]
        odd = torch.cat([odd[..., :1], odd[..., 1:] + odd[..., :-1]], dim=-1)
        x = torch.stack([even, odd], dim=-2)
        m //= 2
    m = 2
    while m <= n:
        half = m // 2
        parts = x.reshape(rows, n // m, 2, half)
        a, b = parts[..., 0, :], parts[..., 1, :] * factor[half:m]
        x = torch.cat([a + b, (a - b).flip(-1)], dim=-1)
        m *= 2
    return x.reshape(rows, n)

"""What users give to the PyTorch adapters, and how gradients get into buckets."""

import collections
import functools
import sys

import numpy as np
import torch

from grace_ext import ConfigError
from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.row_buckets import RowBucket

from .device import TorchBucket
from .rows import to_rows


def named(named_parameters: list) -> dict[str, torch.nn.Parameter]:
    """Parameters by name. Raises ConfigError for what are no (name, parameter) tuples, and for names that are not unique."""
    if any(not (isinstance(item, tuple) and len(item) == 2) for item in named_parameters):
        raise ConfigError("named_parameters should be (name, parameter) tuples, usually model.named_parameters()")
    counts = collections.Counter(name for name, _ in named_parameters)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ConfigError(f"named_parameters: names must be unique; found twice: {', '.join(twice)}")
    return dict(named_parameters)


def pack(bucket: Bucket, gradients: list, factor: float, *out):
    """For Exchange.start: the bucket's gradients, times factor, in the way that it takes them. One that is None is zero.

    out: float32[size], numpy or torch, which they are copied to; but one gradient that is numpy's float32[size] as it is,
    is returned, and a list of several if the bucket wants parts; on a device, a list of tensors. Buckets of rows take no
    out and get a RowGradient.
    """
    if isinstance(bucket, RowBucket):
        return to_rows(
            gradients[0], bucket.tensors[0].shape, factor, bucket.device if isinstance(bucket, TorchBucket) else None
        )
    in_parts = bucket.wants_parts
    if isinstance(bucket, TorchBucket):
        if in_parts and factor == 1.0 and all(_is_flat(gradient, bucket.device) for gradient in gradients):
            return gradients
    elif (len(gradients) == 1 or in_parts) and factor == 1.0 and isinstance(out[0], np.ndarray):
        if arrays := flat_arrays(gradients):
            return arrays if in_parts else arrays[0]
    flat = torch.from_numpy(out[0]) if isinstance(out[0], np.ndarray) else out[0]
    if flat.device.type == "cpu" and all(map(_is_flat, gradients)):
        torch.cat([gradient.view(-1) for gradient in gradients], out=flat)  # many small ones in half the time
    else:
        for gradient, part in zip(gradients, flat.split(bucket.sizes), strict=True):
            if gradient is None:
                part.zero_()
            else:
                part.view(gradient.shape).copy_(gradient if gradient.layout == torch.strided else gradient.to_dense())
    if factor != 1.0:
        flat.mul_(factor)
    return None


def flat_arrays(gradients: list[torch.Tensor | None]) -> list[np.ndarray] | None:
    """The gradients' own memory, float32[n] each; None if one of them is not float32 or lies elsewhere than in a bucket's order."""
    return [gradient.view(-1).numpy() for gradient in gradients] if all(map(_is_flat, gradients)) else None


def own_array(p: torch.nn.Parameter) -> np.ndarray | None:
    """The memory of a parameter's gradient, float32[n], if it lies as in a bucket and nobody else has it; else None."""
    if not (p.requires_grad and _is_flat(p.grad) and hasattr(torch._C, "_storage_Use_Count")):
        return None
    if (
        _uses_of_gradient(p) != _uses_if_nobody_has_it() or p.grad.untyped_storage().nbytes() != p.grad.nbytes
    ):  # the latter: a view of more
        return None
    return p.grad.detach().view(-1).numpy()


def _uses_of_gradient(p: torch.nn.Parameter) -> tuple[int, int]:
    """How many names Python knows it by, and how many tensors and arrays share its memory; each with those of this function."""
    gradient = p.grad
    return sys.getrefcount(gradient), torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)


@functools.cache
def _uses_if_nobody_has_it() -> tuple[int, int]:
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    p.grad = torch.zeros_like(p)
    return _uses_of_gradient(p)


def _is_flat(gradient: torch.Tensor | None, device: str = "cpu") -> bool:
    """Whether its elements lie in memory as in a bucket of that device."""
    return (
        gradient is not None
        and gradient.layout == torch.strided
        and gradient.dtype == torch.float32
        and gradient.device == torch.device(device)
        and gradient.is_contiguous()
    )

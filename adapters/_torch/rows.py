"""Sparse gradients, as nn.Embedding(sparse=True) makes them, in and out of grace_ext.exchange.row_buckets."""

import functools
import logging
from typing import Any

import torch

from grace_ext import ConfigError
from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.row_buckets import RowBucket, RowGradient

_LOG = logging.getLogger("grace_ext")


def comes_as_rows(name: str, gradient: torch.Tensor) -> bool:
    """Whether a gradient is a table's: sparse in its first dimension. Raises ConfigError for other sparse ones."""
    if gradient.layout == torch.strided:
        return False
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ConfigError(
            f"the gradient of {name!r} is sparse in another way than by rows ({gradient.layout}); pass sparse_as_dense=True"
        )
    return True


def say_if_dense(name: str, gradient: torch.Tensor | None, bucket: Bucket) -> None:
    """Log it, once, where the gradient of a table has to go into a bucket of dense ones."""
    if gradient is not None and gradient.layout != torch.strided and not isinstance(bucket, RowBucket):
        _say_dense(name)


@functools.cache
def _say_dense(name: str) -> None:
    _LOG.warning(
        "the gradient of %r is sparse, and is exchanged as a dense one: the ranks agree in the first step on which gradients come "
        "as rows, and then it had none on any rank, or a dense one on some; give the table a sparse gradient in the first step",
        name,
    )


def to_rows(gradient: torch.Tensor | None, shape: tuple[int, ...], factor: float, device: str | None = None) -> Any:
    """A gradient of a table of that shape, times factor; None is no rows, a dense one all of them.

    device: where its rows are to be. Returns a RowGradient with tensors there, or with numpy arrays where it is None.
    """
    width, place = torch.Size(shape[1:]).numel(), device or "cpu"
    if gradient is None:
        indices, values = torch.empty(0, dtype=torch.int64), torch.empty(0, width)
    elif gradient.is_sparse:
        indices, values = gradient._indices()[0], gradient._values()  # coalescing is the bucket's work
    else:
        indices, values = torch.arange(shape[0]), gradient
    indices, values = indices.to(place), values.detach().to(place, torch.float32).reshape(-1, width)
    values = values if factor == 1.0 else values * factor
    return RowGradient(indices, values) if device else RowGradient(indices.numpy(), values.numpy())


def from_rows(rows: RowGradient, like: torch.nn.Parameter, factor: float) -> torch.Tensor:
    """A coalesced sparse gradient of the parameter, times factor."""
    values = torch.from_numpy(rows.values).reshape(-1, *like.shape[1:])
    values = (values if factor == 1.0 else values * factor).to(like.device, like.dtype)
    return torch.sparse_coo_tensor(
        torch.from_numpy(rows.indices)[None].to(like.device), values, like.shape, is_coalesced=True, check_invariants=False
    )

"""Sparse gradients, as nn.Embedding(sparse=True) makes them, in and out of grace_ext.exchange.row_buckets."""

import torch

from grace_ext import ConfigError
from grace_ext.exchange.row_buckets import RowGradient


def comes_as_rows(name: str, gradient: torch.Tensor) -> bool:
    """Whether a gradient is a table's: sparse in its first dimension. Raises ConfigError for other sparse ones."""
    if gradient.layout == torch.strided:
        return False
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ConfigError(
            f"the gradient of {name!r} is sparse in another way than by rows ({gradient.layout}); pass sparse_as_dense=True"
        )
    return True


def to_rows(gradient: torch.Tensor | None, shape: tuple[int, ...], factor: float) -> RowGradient:
    """A gradient of a table of that shape, times factor; None is no rows, a dense one all of them."""
    width = torch.Size(shape[1:]).numel()
    if gradient is None:
        indices, values = torch.empty(0, dtype=torch.int64), torch.empty(0, width)
    elif gradient.is_sparse:
        indices, values = gradient._indices()[0], gradient._values()  # coalescing is the bucket's work
    else:
        indices, values = torch.arange(shape[0]), gradient
    values = values.detach().to("cpu", torch.float32).reshape(-1, width)
    return RowGradient(indices.cpu().numpy(), (values if factor == 1.0 else values * factor).numpy())


def from_rows(rows: RowGradient, like: torch.nn.Parameter, factor: float) -> torch.Tensor:
    """A coalesced sparse gradient of the parameter, times factor."""
    values = torch.from_numpy(rows.values).reshape(-1, *like.shape[1:])
    values = (values if factor == 1.0 else values * factor).to(like.device, like.dtype)
    return torch.sparse_coo_tensor(
        torch.from_numpy(rows.indices)[None].to(like.device), values, like.shape, is_coalesced=True, check_invariants=False
    )

"""Summing rows of a gradient. The counterpart of add_rows in grace_ext/kernels/rows.py."""

import numpy as np
import torch
import triton
import triton.language as tl

from ._launch import blocks, launch

BLOCK = 128


@triton.jit
def sum_rows(values, order, starts, out, width, BLOCK: tl.constexpr):
    """out[q] = the sum of the rows values[order[i]], i from starts[q] to starts[q + 1] - 1, in this order.

    values: float32[n, width]; order: int64[n]; starts: int64[r + 1]; out: float32[r, width]. There are as many programs for each q
    as blocks cover a row.
    """
    programs = tl.cdiv(width, BLOCK)
    q = tl.program_id(0).to(tl.int64) // programs
    column = (tl.program_id(0) % programs) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(starts + q), tl.load(starts + q + 1)):
        row = tl.load(order + i)
        total += tl.load(values + row * width + column, mask=column < width, other=0.0)
    tl.store(out + q * width + column, total, mask=column < width)


def group(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which rows there are, int64[r], ascending; and the kernel's order, int64[n], and starts. indices: int64[n], from 0 on."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    return ordered[starts], order, np.append(starts, indices.size)


def sum_into(out: torch.Tensor, values: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> None:
    """See the kernel. out: float32[r * width]."""
    width = values.shape[1]
    programs = (starts.numel() - 1) * blocks(width, BLOCK)
    launch(sum_rows, programs, values, order, starts, out, width, BLOCK=BLOCK)

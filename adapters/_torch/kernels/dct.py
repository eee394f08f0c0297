"""Fast cosine transforms of chunks, forward and inverse. The counterpart of grace_ext/kernels/dct.py.

Each step of the host's kernel makes an element of one or two elements of the step before, and tables say of which. So a program
has some rows in its registers, and all elements of a step are made at once. Of squares, rows are transformed first, then columns.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from grace_ext.transforms.dct import LARGEST, factors

from ..mailbox import to_device
from ._helpers import NON_FINITE, magnitude_of
from ._launch import blocks, launch

ELEMENTS = 2048  # of a program
_LIMIT = tl.constexpr(float(LARGEST))


@triton.jit
def transform_rows(
    dense, out, first, second, before, after, d, size, STEPS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """Transform each SIZE elements of float32[d], filled up with zeros to `size`, or, if COLUMNS, each column of a square.

    out: float32[size], another array. first, second: int32[STEPS, SIZE]; before, after: float32[STEPS, SIZE]: in each step, element
    i becomes (x[first] + x[second] * before) * after, or x[first] * after where second is -1. If CUT, magnitudes are cut to the
    largest that is transformed, and Inf and NaN become NaN.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, SIZE)
    if COLUMNS:
        at = (row // SIZE * SIZE * SIZE + row % SIZE)[:, None] + (lane * SIZE)[None, :]
    else:
        at = (row * SIZE)[:, None] + lane[None, :]
    x = tl.load(dense + at, mask=at < d, other=0.0)
    if CUT:
        finite = magnitude_of(x) < NON_FINITE
        x = tl.where(finite, tl.minimum(tl.maximum(x, -_LIMIT), _LIMIT), x - x)
    for step in range(STEPS):
        entry = step * SIZE + lane
        other = tl.load(second + entry)
        a = tl.gather(x, tl.broadcast_to(tl.load(first + entry)[None, :], [ROWS, SIZE]), 1)
        b = tl.gather(x, tl.broadcast_to(tl.maximum(other, 0)[None, :], [ROWS, SIZE]), 1)
        summed = a + b * tl.load(before + entry)[None, :]
        x = tl.where((other >= 0)[None, :], summed, a) * tl.load(after + entry)[None, :]
    tl.store(out + at, x, mask=at < size)


def transform(dense: torch.Tensor, size: int, n: int, dims: int, inverse: bool) -> torch.Tensor:
    """Transform float32[d], filled up with zeros to `size`, in chunks of n elements, or in squares of n x n with dims=2.

    The forward transform cuts magnitudes first; see the kernel. Returns float32[size].
    """
    tables, rows = _tables(n, inverse, str(dense.device)), ELEMENTS // n
    out = torch.empty(size, dtype=torch.float32, device=dense.device)
    programs, d = blocks(size // n, rows), dense.numel()
    sizes = {"STEPS": len(tables[0]), "SIZE": n, "ROWS": rows}
    launch(transform_rows, programs, dense, out, *tables, d, size, **sizes, COLUMNS=False, CUT=not inverse)
    if dims == 1:
        return out
    columns = torch.empty_like(out)
    launch(transform_rows, programs, out, columns, *tables, size, size, **sizes, COLUMNS=True, CUT=False)
    return columns


@functools.lru_cache(maxsize=16)
def _tables(n: int, inverse: bool, device: str) -> tuple[torch.Tensor, ...]:
    """The kernel's four tables."""
    steps = _inverse(n) if inverse else _forward(n)
    dtypes = (np.int32, np.int32, np.float32, np.float32)
    tables = zip(zip(*steps, strict=True), dtypes, strict=True)
    return tuple(to_device(np.array(table, dtype), device) for table, dtype in tables)


class _Step:
    """A step that leaves everything as it is, to be changed. at: int[n / m, m], the elements by blocks of m."""

    def __init__(self, n: int, m: int):
        self.at = np.arange(n).reshape(-1, m)
        self.first, self.second = self.at.copy(), np.full_like(self.at, -1)
        self.before, self.after = (np.ones(self.at.shape, np.float32) for _ in range(2))

    def __iter__(self):
        return (table.reshape(-1) for table in (self.first, self.second, self.before, self.after))


def _scaled(n: int) -> _Step:
    """The factors of the coefficients."""
    step, factor = _Step(n, n), factors(n)
    step.after[:] = np.float32(factor[0] * np.float32(1.4142135))
    step.after[:, 0] = factor[0]
    return step


def _forward(n: int) -> list[_Step]:
    steps, m = [], n
    while m > 1:  # sums and differences of what is as far from both ends of a block
        half, step = m // 2, _Step(n, m)
        step.first[:, half:] = step.at[:, :half]
        step.second[:, :half] = step.second[:, half:] = step.at[:, : half - 1 : -1]
        step.before[:, half:] = -1
        step.after[:, half:] = factors(n)[half:m]
        steps.append(step)
        m = half
    for m in (1 << e for e in range(2, n.bit_length())):  # both halves by turns, the second one's neighbors summed
        half, step = m // 2, _Step(n, m)
        step.first[:, ::2], step.first[:, 1::2] = step.at[:, :half], step.at[:, half:]
        step.second[:, 1:-1:2] = step.at[:, half + 1 :]
        steps.append(step)
    return [*steps, _scaled(n)]


def _inverse(n: int) -> list[_Step]:
    """The transposed steps in reverse order."""
    steps, sizes = [_scaled(n)], [1 << e for e in range(1, n.bit_length())]
    for m in sizes[:0:-1]:
        half, step = m // 2, _Step(n, m)
        step.first[:, :half], step.first[:, half:] = step.at[:, ::2], step.at[:, 1::2]
        step.second[:, half + 1 :] = step.at[:, 1:-1:2]
        steps.append(step)
    for m in sizes:
        half, step = m // 2, _Step(n, m)
        step.first[:, half:] = step.at[:, half - 1 :: -1]
        step.second[:, :half], step.second[:, half:] = step.at[:, half:], step.at[:, : half - 1 : -1]
        step.before[:, :half], step.before[:, half:] = factors(n)[half:m], -factors(n)[half:m][::-1]
        steps.append(step)
    return steps

"""What `lloyd` needs to know of values, and their levels. The counterpart of grace_ext/kernels/lloyd.py.

The search for the levels goes over a histogram, which crosses to the host: it is of one size, however many values there are.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from grace_ext.kernels._sums import SQUARES_BLOCK
from grace_ext.kernels.lloyd import BINS, MOST, SAMPLE

from ..mailbox import to_host
from ._helpers import ROWS, bits_of, block_offsets, count_in_rows, float_of, magnitude_of, random32, wide
from ._launch import blocks, launch
from .natural import find_range

BLOCK = 1024
ESCAPE = 2 * MOST + 1
TOGETHER = 8  # blocks whose squares a program adds up, two in each warp
UNROLLED = 32  # rows of 16 values that are loaded before they are added up one after the other
_SMALLEST = tl.constexpr(2.0**-120)  # of widths of a bin
_LARGEST = tl.constexpr(2.0**115)


@triton.jit
def square_sums(values, sums, leasts, n, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, UNROLLED: tl.constexpr):
    """sums, float64[blocks], and leasts, int32[blocks]: each block's sum of squares and the bits of its smallest magnitude.

    values: float32[n], in blocks of BLOCK. In the order of the host's kernel: value i of a block to sum i & 15, then sum after sum.
    """
    block = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    lane = tl.arange(0, 16)[None, :]
    own = tl.zeros([TOGETHER, 16], tl.float64)
    least = tl.full([TOGETHER, 16], 0x7FFFFFFF, tl.int32)
    for first in range(0, tl.minimum(n, BLOCK), 16 * UNROLLED):
        for row in tl.static_range(UNROLLED):
            at = block[:, None] * BLOCK + first + 16 * row + lane
            x = tl.load(values + at, mask=at < n, other=0.0)
            own += x.to(tl.float64) * x.to(tl.float64)
            least = tl.where(at < n, tl.minimum(least, magnitude_of(x).to(tl.int32)), least)
    total = tl.zeros([TOGETHER], tl.float64)
    for i in tl.static_range(16):
        total += tl.sum(tl.where(lane == i, own, 0.0), axis=1)
    inside = block * BLOCK < n
    tl.store(sums + block, total, mask=inside)
    tl.store(leasts + block, tl.min(least, axis=1), mask=inside)


@triton.jit
def sum_blocks(sums, leasts, out, m, UNROLLED: tl.constexpr):
    """out, float64[2]: the sum of the sums of m blocks, and the smallest magnitude.

    One program adds up in the order of the host's kernel: block b to sum b & 15, then sum after sum.
    """
    lane = tl.arange(0, 16)
    total = tl.zeros([16], tl.float64)
    least = tl.full([16], 0x7FFFFFFF, tl.int32)
    for first in range(0, m, 16 * UNROLLED):
        for row in tl.static_range(UNROLLED):
            block = first + 16 * row + lane
            total += tl.load(sums + block, mask=block < m, other=0.0)
            least = tl.minimum(least, tl.load(leasts + block, mask=block < m, other=0x7FFFFFFF))
    whole = tl.zeros([], tl.float64)
    for i in tl.static_range(16):
        whole += tl.sum(tl.where(lane == i, total, 0.0))
    tl.store(out, whole)
    tl.store(out + 1, float_of(tl.min(least).to(tl.uint32)).to(tl.float64))


@triton.jit
def magnitude_histogram(values, sums, error, counts, n, sample, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the magnitudes of float32[n] by bins, those of a sample if `sample` is below n.

    counts: int32[ROWS, BINS], zeroed; see count_in_rows.
    sums: what sum_blocks gave; error: float64[1]. The width of a bin is that of choose_levels on the host.
    """
    root = tl.sqrt(tl.load(sums) / tl.cast(n, tl.float64))
    width = tl.minimum(tl.maximum(tl.load(error) * root * 0.5, _SMALLEST), _LARGEST)
    scale = (1.0 / width).to(tl.float32)
    number = block_offsets(BLOCK)
    first, last = number * wide(n) // sample, (number + 1) * wide(n) // sample
    zero = tl.zeros([BLOCK], tl.uint32)
    drawn = random32(number.to(tl.uint32), zero, zero).to(tl.int64) % tl.maximum(last - first, 1)
    at = tl.where(sample < n, first + drawn, number)
    inside = number < sample
    x = float_of(magnitude_of(tl.load(values + at, mask=inside, other=0.0))) * scale
    counted = inside & (x < BINS)
    count_in_rows(counts, tl.where(counted, x, 0.0).to(tl.int32), number, counted, BINS)


@triton.jit
def nearest_levels(values, grid, levels, beyond, n, most, BLOCK: tl.constexpr):
    """levels, uint8[n]: `most` + the signed level of each of float32[n], 255 above 127 levels, which `beyond`, int32[1], counts.

    grid: float32[2], the inverse of the step, and what is added to a magnitude in steps for its level.
    """
    at = block_offsets(BLOCK)
    inside = at < n
    x = tl.load(values + at, mask=inside, other=0.0)
    y = float_of(magnitude_of(x)) * tl.load(grid) + tl.load(grid + 1)
    level = tl.minimum(tl.maximum(y, 0.0), tl.cast(most + 1, tl.float32)).to(tl.int32)
    code = (most + tl.where(bits_of(x) >= 0x80000000, -level, level)) & 255
    tl.store(levels + at, code.to(tl.uint8), mask=inside)
    tl.atomic_add(beyond, tl.sum((inside & (most == 127) & (code == 255)).to(tl.int32)), sem="relaxed")


def moments_and_counts(source, error: float):
    """What the search needs. source: a device_values.Source.

    Returns the source without a residual, which has been added; the moments, float64[3]: sum of squares, smallest and largest
    magnitude; the counts of the histogram, int32[BINS]; and how many values it has. None in place of the moments if a value
    is not finite. The host waits.
    """
    device, n = source.values.device, source.values.numel()
    found, work = torch.empty(2, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.float64, device=device)
    counts = torch.zeros((ROWS, BINS), dtype=torch.int32, device=device)
    special = torch.zeros(1, dtype=torch.int32, device=device)
    source = find_range(source, found, special)
    work[2].fill_(error)
    m = blocks(n, SQUARES_BLOCK)
    sums, leasts = torch.empty(m, dtype=torch.float64, device=device), torch.empty(m, dtype=torch.int32, device=device)
    launch(
        square_sums, blocks(m, TOGETHER), source.values, sums, leasts, n, BLOCK=SQUARES_BLOCK, TOGETHER=TOGETHER, UNROLLED=UNROLLED
    )  # fmt: skip
    launch(sum_blocks, 1, sums, leasts, work, m, UNROLLED=UNROLLED, num_warps=1)
    sample = min(n, SAMPLE)
    launch(
        magnitude_histogram, blocks(sample, BLOCK), source.values, work, work[2:], counts, n, sample, BINS=BINS, BLOCK=BLOCK
    )  # fmt: skip
    fetched = to_host(torch.cat([work[:2].view(torch.int32), found, special, counts.sum(0, dtype=torch.int32)]))
    if fetched[6]:
        return source, None, None, sample
    moments = np.empty(3)
    moments[:2] = fetched[:4].view(np.float64)
    moments[2] = fetched[5:6].view(np.float32)[0]
    return source, moments, fetched[7:], sample


def quantize(source, grid: torch.Tensor, most: int, beyond: torch.Tensor) -> torch.Tensor:
    """See nearest_levels, whose levels it returns."""
    n = source.values.numel()
    levels = torch.empty(n, dtype=torch.uint8, device=grid.device)
    launch(nearest_levels, blocks(n, BLOCK), source.values, grid, levels, beyond, n, most, BLOCK=BLOCK)
    return levels

"""Sketches of a bucket's tensors. The counterpart of random_sketch in grace_ext/kernels/second_moment.py."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from grace_ext.kernels._sums import LANES
from grace_ext.kernels._sums import SKETCH_BLOCK as BLOCK
from grace_ext.kernels._sums import SKETCH_SUMS as SUMS

from ..mailbox import to_device
from ._helpers import bits_of, float_of, random32, uint32_of
from ._launch import launch, signed32

AT_ONCE = 16  # blocks of a program
WARPS = 8  # of a program that adds up the blocks of a tensor
_SUMS = tl.constexpr(SUMS)
_HALVINGS = tl.constexpr(SUMS.bit_length() - 1)


@triton.jit(do_not_specialize=["low", "high"])  # a key of each step must not mean a compilation
def sketch_blocks(values, starts, numbers, sizes, partial, low, high, AT_ONCE: tl.constexpr):
    """Sum each whole block into a row of `partial`, float32[programs * AT_ONCE, 8].

    Program i has sizes[i] elements from values[starts[i]] on, at most 256 * AT_ONCE, which belong to one tensor, and the first of
    which is in its block numbers[i]. Element 8r + j of a block goes to number j, negative if bit r of the block's random number
    is set; four sums are kept for each number, of the rows with the same r % 4, as on the host.
    """
    program = tl.program_id(0)
    start, size = tl.load(starts + program), tl.load(sizes + program)
    block = tl.arange(0, AT_ONCE)
    number = (tl.load(numbers + program) + block).to(tl.uint32)
    words = random32(number, uint32_of(low), uint32_of(high))[:, None, None]
    row, lane = tl.arange(0, 4)[None, :, None], tl.arange(0, 8)[None, None, :]
    whole = block < size // 256
    totals = tl.zeros([AT_ONCE, 4, 8], tl.float32)
    for four in tl.static_range(8):
        at = block[:, None, None] * 256 + four * 32 + row * 8 + lane
        x = tl.load(values + start + at, mask=whole[:, None, None], other=0.0)
        flip = ((words >> (4 * four + row).to(tl.uint32)) & 1) << 31
        totals += float_of(bits_of(x) ^ flip)
    pairs = tl.sum(tl.reshape(totals, [AT_ONCE, 2, 2, 8]), axis=2)
    place = (program.to(tl.int64) * AT_ONCE + block)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(partial + place, tl.sum(pairs, axis=1), mask=whole[:, None])


@triton.jit(do_not_specialize=["low", "high"])
def sketch_tensors(values, starts, sizes, firsts, partial, sketches, low, high):
    """sketches[i] = the sum of the rows of a tensor's whole blocks, and of what follows them, in the order of the host.

    Program i has the tensor of sizes[i] elements from values[starts[i]] on; its blocks' rows of `partial` begin with firsts[i].
    Block b is added to sum b % SUMS, the second half of the sums to the first, and so on, and what is no whole block at the end.
    """
    tensor = tl.program_id(0)
    start, size, first = tl.load(starts + tensor), tl.load(sizes + tensor), tl.load(firsts + tensor)
    lane, place = tl.arange(0, 8), tl.arange(0, _SUMS)[:, None]
    whole = (size // 256).to(tl.int32)
    sums = tl.zeros([_SUMS, 8], tl.float32)
    for block in tl.range(0, whole, _SUMS, loop_unroll_factor=4):
        row = partial + first * 8 + (block + place) * 8 + lane[None, :]
        sums += tl.load(row, mask=block + place < whole, other=0.0)
    for i in tl.static_range(1, _HALVINGS + 1):
        sums = tl.sum(tl.reshape(sums, [2, _SUMS >> i, 8]), axis=0)
    rest = tl.zeros([8], tl.float32)
    word = random32(whole.to(tl.uint32), uint32_of(low), uint32_of(high))
    for row in range(0, (size - whole * 256 + 7) // 8):
        at = whole * 256 + row * 8 + lane
        x = tl.load(values + start + at, mask=at < size, other=0.0)
        flip = ((word >> uint32_of(row)) & 1) << 31
        rest += float_of(bits_of(x) ^ flip)
    tl.store(sketches + tensor * 8 + lane, tl.reshape(sums, [8]) + rest)


class Sketcher:
    """Computes the sketches of a bucket's tensors.

    sizes: their numbers of elements, in the order of the bucket's vector.
    """

    def __init__(self, sizes: Sequence[int], device: str):
        most = BLOCK * AT_ONCE
        self._tensors, self._device = len(sizes), device
        own = np.array(sizes, np.int64)
        begin = np.cumsum(own) - own
        programs = np.maximum(-(-own // most), 1)
        firsts = np.cumsum(programs) - programs
        within = np.arange(programs.sum()) - np.repeat(firsts, programs)
        self._programs = int(programs.sum())
        self._of_programs = [
            to_device(array, device)
            for array in (
                np.repeat(begin, programs) + within * most,
                within * AT_ONCE,
                np.clip(np.repeat(own, programs) - within * most, 0, most),
            )
        ]
        self._of_tensors = [to_device(array, device) for array in (begin, own, firsts * AT_ONCE)]
        self._partial = torch.empty(self._programs * AT_ONCE * LANES, dtype=torch.float32, device=device)

    def sketches(self, values: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
        """values: float32[d], the bucket's vector; key: that of the random numbers. Returns float32[tensors, 8]."""
        found = torch.empty((self._tensors, LANES), dtype=torch.float32, device=self._device)
        low, high = (signed32(int(half)) for half in key)
        launch(
            sketch_blocks, self._programs, values, *self._of_programs, self._partial, low, high, AT_ONCE=AT_ONCE, num_warps=4
        )
        launch(sketch_tensors, self._tensors, values, *self._of_tensors, self._partial, found, low, high, num_warps=WARPS)
        return found

"""Exact selection of the k largest magnitudes in one pass over the gradient. The counterpart of grace_ext/kernels/topk.py.

A sample gives a bound that is a little below the k-th largest magnitude. One pass adds the residual and collects the
candidates from the bound on, each block into a segment of its own. A radix selection finds the k-th largest candidate, and
what is above it, and the first of its ties, are copied to where the counts of the blocks before say. So the order in which
programs run decides nothing, and the host waits once: for how many there are. Where the sample was misleading, the same
kernels go over the whole gradient.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from . import radix
from ._helpers import MAGNITUDE, bits_of, block_offsets, load_state, magnitude_of, random32, store_state, wide
from ._launch import blocks, launch
from .parts import Layout, Parts
from .radix import BOUND, COUNT, LARGER, ROUNDS

BLOCK = 2048  # elements of a program that collects candidates
WARPS = 4  # of such a program
LANES = 128  # candidates of a block that are looked at at once
_SPARE = 65536  # candidates that there is room for beside twice those that are selected
_MAX_LINES = 4096  # sampled cache lines of 16 floats
_SAMPLE_BLOCK = 1024
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def sample_bits(
    gradient, residual, out, d, lines, columns, FUSED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the bits of a line of 16 elements from each of `lines` equal strata. out: int32[16 lines]. PARTS: see add_and_collect."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line, lane, written = (at // 16).to(tl.int64), at % 16, at < 16 * lines
    if PARTS:
        column = columns - lines + line
        place = tl.load(gradient + columns + column, mask=written, other=0) + lane
        inside = written & (lane < tl.load(gradient + 2 * columns + column, mask=written, other=0))
        source = tl.load(gradient + column, mask=written, other=0).to(tl.pointer_type(tl.float32))
        x = tl.load(source + lane, mask=inside, other=0.0)
    else:
        whole = wide(d // 16)
        first, last = line * whole // lines, (line + 1) * whole // lines
        length = tl.maximum(last - first, 1)
        drawn = random32(line.to(tl.uint32), tl.zeros([BLOCK], tl.uint32), tl.zeros([BLOCK], tl.uint32))
        place, inside = (first + drawn.to(tl.int64) % length) * 16 + lane, written
        x = tl.load(gradient + place, mask=inside, other=0.0)
    if FUSED:
        x += load_state(residual, place, inside)
    tl.store(out + at, bits_of(x).to(tl.int32, bitcast=True), mask=written)


@triton.jit
def add_and_collect(
    gradient,
    residual,
    out,
    bound,
    positions,
    bits,
    segments,
    counts,
    state,
    d,
    columns,
    room,
    FUSED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = gradient + residual if FUSED (out may be one of both), and collect the magnitudes from `bound` on, at least 1.

    gradient: float32[d]; residual, out: see store_state. positions, bits: int32[room]; a block's candidates are in the segment that begins
    at segments[block], ascending, counts[block] of them. If there are more than `room`, those that do not fit are left out.
    If PARTS, the gradient lies in several tensors, and int64[3, columns] says where (parts.py).
    """
    if PARTS:
        block, lane = tl.program_id(0), tl.arange(0, BLOCK)
        at = tl.load(gradient + columns + block).to(tl.int32) + lane  # below 2^31 inside, in half the registers of int64
        inside = lane < tl.load(gradient + 2 * columns + block)
        source = tl.load(gradient + block).to(tl.pointer_type(tl.float32))
        x = tl.load(source + lane, mask=inside, other=0.0)
    else:
        at = block_offsets(BLOCK)
        inside = at < d
        x = tl.load(gradient + at, mask=inside, other=0.0)
    if FUSED:
        x += load_state(residual, at, inside)
        store_state(out, at, x, inside)
    least = tl.maximum(tl.load(bound + BOUND), 1).to(tl.uint32)
    chosen = (magnitude_of(x) >= least).to(tl.int32)
    n = tl.sum(chosen)
    segment = tl.atomic_add(state + COUNT, n, sem="relaxed")
    tl.store(segments + tl.program_id(0), segment)
    tl.store(counts + tl.program_id(0), n)
    place = segment + tl.cumsum(chosen) - chosen
    fits = (chosen > 0) & (place < room)
    tl.store(positions + place, at.to(tl.int32), mask=fits)
    tl.store(bits + place, bits_of(x).to(tl.int32, bitcast=True), mask=fits)


@triton.jit
def count_kept(bits, segments, counts, state, above, ties, d, room, WHOLE: tl.constexpr, LANES: tl.constexpr):
    """How many magnitudes of each block are above the k-th largest, and how many equal it. Not WHOLE: of its candidates."""
    block = tl.program_id(0)
    start, n = _segment(block, segments, counts, d, room, WHOLE)
    bound = tl.load(state + BOUND).to(tl.uint32)
    larger = tl.zeros([LANES], tl.int32)
    equal = tl.zeros([LANES], tl.int32)
    for first in range(0, n, LANES):
        lane = first + tl.arange(0, LANES)
        inside = lane < n
        x = tl.load(bits + start + lane, mask=inside, other=0).to(tl.uint32, bitcast=True) & MAGNITUDE
        larger += (inside & (x > bound)).to(tl.int32)
        equal += (inside & (x == bound)).to(tl.int32)
    tl.store(above + block, tl.sum(larger))
    tl.store(ties + block, tl.sum(equal))


@triton.jit
def compact(
    positions, bits, segments, counts, state, above, ties, above_ends, ties_ends, rank, out_positions, out_bits, d, room,
    WHOLE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Copy what is above the k-th largest, and the first of its ties, to its place in ascending order.

    above_ends, ties_ends: the cumulative sums of above and ties. Zeros are never copied.
    """
    block = tl.program_id(0)
    start, n = _segment(block, segments, counts, d, room, WHOLE)
    rank = tl.minimum(rank, tl.minimum(tl.load(state + COUNT), room))
    bound = tl.load(state + BOUND).to(tl.uint32)
    quota = tl.where(bound > 0, rank - tl.load(state + LARGER), 0)
    before = tl.load(ties_ends + block) - tl.load(ties + block)
    to = tl.load(above_ends + block) - tl.load(above + block) + tl.minimum(before, quota)
    for first in range(0, n, LANES):
        lane = first + tl.arange(0, LANES)
        inside = lane < n
        u = tl.load(bits + start + lane, mask=inside, other=0)
        x = u.to(tl.uint32, bitcast=True) & MAGNITUDE
        tie = (inside & (x == bound)).to(tl.int32)
        earlier = before + tl.cumsum(tie) - tie
        kept = (inside & ((x > bound) | ((tie > 0) & (earlier < quota)))).to(tl.int32)
        place = to + tl.cumsum(kept) - kept
        if WHOLE:
            position = (start + lane).to(tl.int32)
        else:
            position = tl.load(positions + start + lane, mask=kept > 0, other=0)
        tl.store(out_positions + place, position, mask=kept > 0)
        tl.store(out_bits + place, u, mask=kept > 0)
        before += tl.sum(tie)
        to += tl.sum(kept)


@triton.jit
def _segment(block, segments, counts, d, room, WHOLE: tl.constexpr):
    """Where a block's candidates begin, and how many there are: all its elements if WHOLE."""
    if WHOLE:
        start = block.to(tl.int64) * _BLOCK
        n = tl.minimum(d - start, _BLOCK).to(tl.int32)
    else:
        start = tl.load(segments + block).to(tl.int64)
        n = tl.minimum(tl.load(counts + block), tl.maximum(room - start, 0).to(tl.int32))
    return start, n


class Selection:
    """The k largest magnitudes of float32[d], on the gradient's device.

    positions: int32[k], ascending. bits: int32[k], those of the values. finite: False if some element is not; then positions
    and bits hold one that is not, and nothing else is said of them.
    """

    def __init__(self, positions: torch.Tensor, bits: torch.Tensor, finite: bool):
        self.positions, self.bits, self.finite = positions, bits, finite


class Work:
    """The arrays of one selection. target: where the sum is. States: that of the sample, then that of the candidates.

    addends: the gradient and the residual, if the target has less than float32 of their sum.
    """

    addends: tuple[torch.Tensor | Parts, torch.Tensor]

    def __init__(self, target: torch.Tensor, k: int, room: int, programs: int | None = None):
        d, device = target.numel(), target.device
        self.target, self.d, self.k, self.room = target, d, k, min(d, room)
        self.programs = blocks(d, BLOCK) if programs is None else programs
        self.states = torch.zeros((2, 4), dtype=torch.int32, device=device)
        self.histogram = torch.zeros(radix.SIZE, dtype=torch.int32, device=device)
        self.per_block = torch.empty((4, self.programs), dtype=torch.int32, device=device)
        self.candidates = torch.empty((2, self.room), dtype=torch.int32, device=device)
        self.selected = torch.empty((2, k), dtype=torch.int32, device=device)


def select_topk(gradient, residual, out, k: int, spare: int = _SPARE) -> Selection:
    """Select the k largest magnitudes of gradient + residual, which is written to `out`, or of gradient.

    gradient, out: float32[d], which may be the same; residual: float32[d], or None: then `out` is not written. Where the residual is
    bfloat16[d], `out` can be the bits of such a state, int16[d], and the gradient is undefined afterwards. The gradient can also be
    Parts; they need a residual, and stay as they are. 1 <= k <= d. Zeros are never selected; ties go to the lowest index, as in the
    host's kernel. spare: there is room for 2k + spare candidates; more than that are more work, and no other result.
    """
    if gradient.numel() == 0:
        return Selection(*torch.empty((2, 0), dtype=torch.int32, device=gradient.device), True)
    work = _begin(gradient, residual, out, k, spare)
    return _end(work, work.states.tolist())  # the one time that the host waits


def select_topk_of_parts(gradient, residual, out, sizes: Sequence[int], count: Callable[[int], int]) -> Selection:
    """Select count(n) of each n elements that belong together; see select_topk. The host waits once for all of them.

    sizes: how many elements belong together, in the order of the gradient.
    """
    works, starts, start = [], [], 0
    for size in sizes:
        part = slice(start, start + size)
        if size:
            addend = None if residual is None else residual[part]
            works.append(_begin(gradient[part], addend, out[part], count(size), _SPARE // len(sizes)))
            starts.append(start)
        start += size
    if not works:
        return Selection(*torch.empty((2, 0), dtype=torch.int32, device=gradient.device), True)
    states = torch.stack([work.states for work in works]).tolist()
    found = [_end(work, state) for work, state in zip(works, states, strict=True)]
    positions = torch.cat([one.positions + start for one, start in zip(found, starts, strict=True)])
    return Selection(positions, torch.cat([one.bits for one in found]), all(one.finite for one in found))


def _begin(gradient, residual, out, k: int, spare: int) -> Work:
    """Queue a selection."""
    programs = gradient.layout.blocks if isinstance(gradient, Parts) else None
    work = Work(gradient if residual is None else out, k, 2 * k + spare, programs)
    work.addends = gradient, residual
    given, columns = (gradient.table(), gradient.layout.columns) if isinstance(gradient, Parts) else (gradient, 0)
    _bound_from_sample(work, given, residual, columns)
    collect(work, given, residual, columns)
    _select(work, work.candidates[1], work.room, whole=False)
    return work


def collect(work: Work, gradient, residual, columns: int = 0) -> None:
    """Add the residual, and collect the candidates from the bound on that the sample's state has. columns: of a table of parts."""
    fused, addend = _addend(gradient, residual)
    launch(
        add_and_collect, work.programs, gradient, addend, work.target, work.states[0], *work.candidates, *work.per_block[:2],
        work.states[1], work.d, columns, work.room, FUSED=fused, PARTS=columns > 0, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _addend(gradient, residual) -> tuple[bool, torch.Tensor]:
    """Whether there is a residual, and what kernels get of it."""
    if residual is None:
        return False, gradient
    return True, residual.view(torch.int16) if residual.dtype == torch.bfloat16 else residual


def _end(work: Work, states: list[list[int]]) -> Selection:
    """What was selected. states: the work's on the host."""
    (bound, _, _, _), (_, _, special, count) = states
    n = min(work.k, count)
    if count > work.room or count < work.k and bound > 1:
        dense = work.target
        if dense.dtype != torch.float32:
            gradient, residual = work.addends
            dense = (gradient.joined() if isinstance(gradient, Parts) else gradient).add_(residual)
        n, special = _select_from_all(work, dense)
    return Selection(*work.selected[:, :n], not special)


def parts_layout(sizes: Sequence[int]) -> Layout:
    """The layout of tensors of these sizes, as Parts need it here: a line of each of equal strata is sampled."""
    d = sum(sizes)
    strata = np.linspace(0, d // 16, sample_size(d) // 16, endpoint=False).astype(np.int64)
    drawn = np.random.default_rng(0).integers(0, max(d // 16 // max(strata.size, 1), 1), strata.size)
    return Layout(sizes, BLOCK, 16 * (strata + drawn))


def sample_size(d: int) -> int:
    """The number of elements that are sampled of d, in lines of 16."""
    return 16 * min(max(d // (16 * 1024), 64), _MAX_LINES, d // 16)


def _bound_from_sample(work: Work, gradient, residual, columns: int) -> None:
    """Leave a magnitude in the state of the sample that is below the k-th largest, by 4 sigma; 0 if all may be needed."""
    n = sample_size(work.d)
    rank = work.k / work.d * n
    deep = int(rank + 4.0 * math.sqrt(2.0 * rank) + 8.0)
    if deep >= n:
        return
    bits = torch.empty(n, dtype=torch.int32, device=gradient.device)
    constants = {"PARTS": columns > 0, "BLOCK": _SAMPLE_BLOCK}
    fused, addend = _addend(gradient, residual)
    programs = blocks(n, _SAMPLE_BLOCK)
    launch(sample_bits, programs, gradient, addend, bits, work.d, n // 16, columns, FUSED=fused, **constants)
    bound_from_bits(work, bits, deep)


def bound_from_bits(work: Work, bits, rank: int) -> None:
    """Leave the rank-th largest magnitude of a sample, without its last 9 bits, in the state of the sample. bits: int32[n]."""
    work.states[0, COUNT.value].fill_(bits.numel())
    radix.select(work.histogram, bits, work.states[0], bits.numel(), rank, ROUNDS[:2])


def _select(work: Work, bits, room: int, whole: bool) -> None:
    """Find the k-th largest of the candidates, or of all, and copy what is selected."""
    state = work.states[1]
    radix.select(work.histogram, bits, state, room, work.k, ROUNDS)
    compact_kept(work, bits, room, whole)


def compact_kept(work: Work, bits, room: int, whole: bool) -> None:
    """Copy what is above the bound of the candidates' state, and the first of its ties."""
    state, per_block = work.states[1], work.per_block
    sizes = {"WHOLE": whole, "LANES": 8 * LANES if whole else LANES, "num_warps": 4 if whole else 1}
    launch(count_kept, work.programs, bits, per_block[0], per_block[1], state, *per_block[2:], work.d, room, **sizes)
    ends = torch.cumsum(per_block[2:], 1, dtype=torch.int32)
    launch(
        compact, work.programs, work.candidates[0], bits, per_block[0], per_block[1], state, *per_block[2:], *ends, work.k,
        *work.selected, work.d, room, **sizes,
    )  # fmt: skip


def _select_from_all(work: Work, dense) -> tuple[int, int]:
    """The slow exact way: histograms of the whole tensor. Returns how many are selected, and whether any is not finite."""
    work.states[1].zero_()
    work.states[1, COUNT.value].fill_(work.d)
    _select(work, dense.view(torch.int32), work.d, whole=True)
    bound, larger, special, _ = work.states[1].tolist()
    return (work.k if bound else larger), special

"""Sparsifier `topk`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels import select_topk
from ..kernels._intrinsics import LANES
from ..kernels._ranks import BINS
from ..kernels.chunks import select_chunks
from ..kernels.topk import (
    add_and_collect,
    candidate_room,
    choose_topk,
    sample_room,
    sample_sum,
    sketch_and_collect,
    topk_bounds,
)
from ..registry import register
from .base import NO_VALUES, Scope, Sparsifier
from .parts import SketchedParts

_LARGEST_BLOCK = 1 << 24


@register
class TopK(Sparsifier):
    """Selects the k largest magnitudes, exactly.

    Args:
        density: Share of the elements to select, above 0 and at most 1; at least one element is selected, but never a zero.
        per: What the share is taken of. bucket: all tensors that are sent together; tensor: each tensor separately; a number:
            each so many successive elements of a tensor, from 2 to 16777216; chunk: each chunk of the transform, always with
            the same number of elements, zeros included.

    Source:
        Aji and Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; Stich, Cordonnier and Jaggi,
        Sparsified SGD with memory, NeurIPS 2018, for the error feedback that it needs; the largest of each 4096 elements:
        Sarfi et al., Communication efficient LLM pre-training with SparseLoCo, arXiv 2508.15706.
    """

    name = "topk"

    def __init__(self, density: float = 0.01, per: str = "bucket"):
        if not 0 < density <= 1:
            raise ConfigError(f"topk: density={density}; allowed: above 0 and at most 1")
        self.density = density
        self.per = str(per)
        #: Number of elements, of each of which the share is taken; 0 where `per` is a word.
        self.block = int(self.per) if self.per.isdecimal() else 0
        if not (2 <= self.block <= _LARGEST_BLOCK or self.per in ("bucket", "tensor", "chunk")):
            raise ConfigError(f"topk: per={per}; allowed: bucket, tensor, chunk, or a number from 2 to {_LARGEST_BLOCK}")

    def count(self, d: int) -> int:
        """Return how many elements are selected at most.

        Args:
            d: Number of elements.

        Returns:
            k, at least 1 unless d is 0.
        """
        return min(d, max(1, round(self.density * d)))

    @property
    def needs_chunks(self) -> bool:  # type: ignore[override]
        """Whether the share is taken of each chunk of a transform."""
        return self.per == "chunk"

    def select(self, dense: np.ndarray, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        if self.per == "chunk":
            return select_largest_per_chunk(dense, scope.chunk, self.count(scope.chunk))
        if self.block:
            return self._select_of_blocks(dense, scope.sizes)
        return self._run(dense, dense, NO_VALUES, False, scope.sizes)  # dense itself may be read-only

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]
        """Whether the share is taken of all tensors together."""
        return self.per == "bucket"

    def select_compensated(
        self, gradient: Any, residual: np.ndarray, out: np.ndarray, scope: Scope
    ) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(gradient, list):
            return select_largest_of_parts(gradient, residual, out, self.count(out.size))
        if self.block:
            with non_finite_allowed():
                np.add(gradient, residual, out=out)
            return self._select_of_blocks(out, scope.sizes)
        return self._run(gradient, residual, out, True, scope.sizes)

    def _select_of_blocks(self, dense: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """As `select`, where the share is taken of each block of a tensor. The last one of a tensor may be short."""
        runs, start = [], 0  # where blocks of one length begin and end, and that length
        for size in sizes:
            rest, end = size % self.block, start + size
            runs += [(start, end - rest, self.block), (end - rest, end, rest)]
            start = end
        runs = [(start, end, block) for start, end, block in runs if start < end]
        room = sum((end - start) // block * self.count(block) for start, end, block in runs)
        indices = scratch("topk indices of blocks", np.uint32, room)
        values = scratch("topk values of blocks", np.float32, room)
        n = 0
        for start, end, block in runs:
            positions, found = select_largest_per_chunk(dense[start:end], block, self.count(block))
            sent = found != 0
            positions, found = positions[sent], found[sent]
            np.add(positions, np.uint32(start), out=indices[n : n + positions.size])
            values[n : n + positions.size] = found
            n += positions.size
        return indices[:n], values[:n]

    def _run(
        self, gradient: np.ndarray, residual: np.ndarray, out: np.ndarray, fused: bool, sizes: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.per == "bucket" or len(sizes) == 1:
            return select_largest(gradient, residual, out, fused, self.count(gradient.size))
        room = sum(map(self.count, sizes))
        indices, values = scratch("topk indices", np.uint32, room), scratch("topk values", np.float32, room)
        start = n = 0
        for size in sizes:
            part = slice(start, start + size)
            positions, found = select_largest(gradient[part], residual[part], out[part], fused, self.count(size))
            np.add(positions, np.uint32(start), out=indices[n : n + positions.size])
            values[n : n + positions.size] = found
            start, n = part.stop, n + positions.size
        return indices[:n], values[:n]


def select_largest_per_chunk(values: np.ndarray, chunk: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Select the k largest magnitudes of every chunk.

    Args:
        values: float32[n].
        chunk: Number of values in a chunk.
        k: Number of values to select of each chunk.

    Returns:
        The positions, uint32[m], strictly ascending, and the values, float32[m]; both in scratch arrays.
    """
    room = -(-values.size // chunk) * k
    positions, found = scratch("topk indices", np.uint32, room), scratch("topk values", np.float32, room)
    work = scratch("topk chunk", np.uint32, 3 * (chunk + LANES)).reshape(3, -1)
    n = select_chunks(values, chunk, k, positions, found, work)
    return positions[:n], found[:n]


def select_largest(
    gradient: np.ndarray, residual: np.ndarray, out: np.ndarray, fused: bool, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select the k largest magnitudes; see the kernel select_topk.

    Args:
        gradient: float32[d].
        residual: float32[d]; unused if not fused.
        out: Output, float32[d]: gradient + residual; unused if not fused.
        fused: Whether to select from gradient + residual instead of from the gradient.
        k: Number of elements to select, 1 to d; fewer are selected where others are zero.

    Returns:
        The positions, uint32[n], strictly ascending, and the values, float32[n]; both in scratch arrays.
    """
    d = gradient.size
    if d == 0:
        return np.empty(0, np.uint32), np.empty(0, np.float32)
    positions, found, band, sample, histogram = _work_arrays(d, k)
    n = select_topk(gradient, residual, out, fused, k, positions, found, band, sample, histogram)
    return positions[:n], found[:n].view(np.float32)


def select_largest_of_parts(
    parts: Sequence[np.ndarray], residual: np.ndarray, out: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select the k largest magnitudes of gradient + residual, where the gradient does not lie in one array.

    Args:
        parts: The gradient, vectors float32 that together have d elements. They may lie in `out`, in order. Their sketches, if
            they are SketchedParts, are written.
        residual: float32[d].
        out: Output, float32[d]: gradient + residual.
        k: Number of elements to select, 1 to d; fewer are selected where others are zero.

    Returns:
        As `select_largest`.
    """
    d = out.size
    if d == 0:
        return np.empty(0, np.uint32), np.empty(0, np.float32)
    positions, found, band, sample, histogram = _work_arrays(d, k)
    ends = np.cumsum([part.size for part in parts]).tolist()
    places = [slice(end - part.size, end) for part, end in zip(parts, ends, strict=True)]
    lines, n = sample.size // 16, 0
    for part, at in zip(parts, places, strict=True):
        share = 16 * (lines * at.stop // d - lines * at.start // d)
        n += sample_sum(part, residual[at], sample[n : n + share])
    lower, upper = topk_bounds(sample, n, k, d, histogram)
    count, sketched = 0, parts if isinstance(parts, SketchedParts) else None
    for i, (part, at) in enumerate(zip(parts, places, strict=True)):
        if count < 0:
            if sketched is not None:
                sketched.sketch(i)
            with non_finite_allowed():
                np.add(part, residual[at], out=out[at])
            continue
        arguments = part, residual[at], out[at], at.start, lower, positions[count:], found[count:]
        if sketched is None:
            more = add_and_collect(*arguments)
        else:
            more = sketch_and_collect(*arguments, *sketched.key, sketched.sketches[i])
        count = count + more if more >= 0 else -1
    if sketched is not None:
        sketched.written = True
    n = choose_topk(out.view(np.uint32), k, lower, upper, positions, found, count, band, histogram)
    return positions[:n], found[:n].view(np.float32)


def _work_arrays(d: int, k: int) -> tuple[np.ndarray, ...]:
    """Those of select_topk: positions, found, band, sample and histogram."""
    room = candidate_room(d, k)
    work = scratch("topk work", np.uint32, 3 * room + sample_room(d))
    positions, found, band = work[:room], work[room : 2 * room], work[2 * room : 3 * room]
    return positions, found, band, work[3 * room :], scratch("topk histogram", np.int64, BINS)

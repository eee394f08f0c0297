"""Which elements are selected where the gradient is: the sparsifiers of grace_ext/sparsifiers that rank by magnitude."""

import math
from typing import Any

import numpy as np
import torch

from grace_ext._util.rng import Stream
from grace_ext.kernels import draw_positions
from grace_ext.sparsifiers.adaq import AdaQ
from grace_ext.sparsifiers.dgc import DGC
from grace_ext.sparsifiers.nonzero import NonZero
from grace_ext.sparsifiers.threshold import Threshold

from .kernels import at_least, block_topk, topk
from .mailbox import to_device, to_host

_ROOM = 4096  # of what is selected beside what is expected


def fits(sparsifier: Any, transform: Any) -> bool:
    """Whether a sparsifier's elements can be selected on the device, of a gradient or of the coefficients of a transform."""
    if sparsifier.name != "topk":
        return transform is None and sparsifier.name in _OTHERS
    return (transform.chunk if sparsifier.needs_chunks else sparsifier.block) <= block_topk.MOST_ELEMENTS


def selects_while_rounding(sparsifier: Any) -> bool:
    """Whether the sum is never read again once elements have been selected, so that it need not be kept in float32."""
    return sparsifier.name == "topk" and sparsifier.per == "bucket"


def select(
    sparsifier: Any,
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    sizes: tuple[int, ...],
    stream: Stream,
    chunk: int = 0,
    out: torch.Tensor | None = None,
) -> topk.Selection:
    """Select elements of gradient + residual, which is written to `out`, or of the gradient.

    out: None for the gradient. Another one only if it `selects_while_rounding`; see topk.select_topk.
    chunk: elements of a chunk of the transform, where the sparsifier's share is one of these.
    """
    if sparsifier.name in _OTHERS:
        return _OTHERS[sparsifier.name](sparsifier, gradient, residual, stream)
    if sparsifier.block or chunk:
        return block_topk.select_of_blocks(gradient, residual, gradient, sizes, sparsifier, chunk)
    if sparsifier.per == "tensor":
        return topk.select_topk_of_parts(gradient, residual, gradient, sizes, sparsifier.count)
    return topk.select_topk(gradient, residual, gradient if out is None else out, sparsifier.count(gradient.numel()))


def _threshold(sparsifier: Any, gradient: torch.Tensor, residual: torch.Tensor | None, stream: Stream) -> topk.Selection:
    return at_least.select_at_least(gradient, residual, gradient, sparsifier.bound, gradient.numel() // 16 + _ROOM)


def _dgc(sparsifier: DGC, gradient: torch.Tensor, residual: torch.Tensor | None, stream: Stream) -> topk.Selection:
    d = gradient.numel()
    if d == 0:
        return topk.select_topk(gradient, residual, gradient, 0)
    k, lines = sparsifier.count(d), sparsifier.lines(d)
    if not lines:
        return topk.select_topk(gradient, residual, gradient, k)
    drawn = np.empty(lines, np.uint32)
    draw_positions(drawn, d // sparsifier.LINE, *stream.key())
    places = drawn.astype(np.int64)[:, None] * sparsifier.LINE + np.arange(sparsifier.LINE)
    found = at_least.select_from_sample(
        gradient,
        residual,
        gradient,
        to_device(places.reshape(-1), gradient.device),
        sparsifier.rank(places.size),
        2 * k + _ROOM,
    )
    if not found.finite or found.positions.numel() <= sparsifier.most(k):
        return found
    chosen = topk.select_topk(found.bits.view(torch.float32), None, None, k)
    places = chosen.positions.long()
    return topk.Selection(found.positions[places], found.bits[places], True)


def _adaq(sparsifier: Any, gradient: torch.Tensor, residual: torch.Tensor | None, stream: Stream) -> topk.Selection:
    if residual is not None:
        gradient += residual
    halves = [gradient.clamp(min=0), gradient.clamp(max=0)]
    counts = to_host(torch.stack([torch.count_nonzero(half) for half in halves])).tolist() if gradient.numel() else (0, 0)
    found = [
        topk.select_topk(half, None, None, max(1, math.ceil(sparsifier.density * count)))
        for half, count in zip(halves, counts, strict=True)
    ]
    positions = torch.cat([one.positions for one in found]).sort().values
    return topk.Selection(positions, gradient.view(torch.int32)[positions.long()], all(one.finite for one in found))


#: By the sparsifier's name: all but top-k.
_OTHERS = {Threshold.name: _threshold, NonZero.name: _threshold, DGC.name: _dgc, AdaQ.name: _adaq}

"""Selection of all magnitudes from a bound on: the counterpart of select_above in grace_ext/kernels/topk.py, by the kernels of topk.py."""

from collections.abc import Callable

import torch

from . import radix
from .radix import BOUND, LARGER, ROUNDS
from .topk import Selection, Work, bound_from_bits, collect, compact_kept


def select_at_least(gradient, residual, out, bound: int, room: int) -> Selection:
    """Select all magnitudes whose bits are at least `bound`, which is above 0, of gradient + residual; see select_topk.

    room: there is room for so many; if there are more, the host waits twice.
    """
    return _select_from_bound(gradient, residual, out, room, lambda work: work.states[0, BOUND.value].fill_(bound))


def select_from_sample(gradient, residual, out, places: torch.Tensor, rank: int, room: int) -> Selection:
    """Select all magnitudes that are at least the rank-th largest of a sample without its last 9 bits; see select_at_least.

    places: int64[n], the positions of the sample.
    """
    sampled = gradient[places] if residual is None else gradient[places] + residual[places]
    return _select_from_bound(
        gradient, residual, out, room, lambda work: bound_from_bits(work, sampled.view(torch.int32), rank)
    )


def _select_from_bound(gradient, residual, out, room: int, find_bound: Callable) -> Selection:
    """find_bound: leaves the bound in the sample's state of a selection."""
    if gradient.numel() == 0:
        return Selection(*torch.empty((2, 0), dtype=torch.int32, device=gradient.device), True)
    work = Work(gradient if residual is None else out, min(room, gradient.numel()), room)
    find_bound(work)
    collect(work, gradient, residual)
    state = work.states[1]
    radix.select(work.histogram, work.candidates[1], state, work.room, 1, ROUNDS[:1])  # it tells whether all are finite
    state[: LARGER.value + 1].zero_()  # all candidates are above this bound
    compact_kept(work, work.candidates[1], work.room, whole=False)
    _, _, special, count = state.tolist()
    if count > work.room:
        bound = work.states[0, : BOUND.value + 1].clone()
        return _select_from_bound(
            work.target, None, work.target, count, lambda again: again.states[0, : BOUND.value + 1].copy_(bound)
        )
    return Selection(*work.selected[:, :count], not special)

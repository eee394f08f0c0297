"""What communicators share that cut a bucket into slices, each with an owner."""

import dataclasses

import numpy as np

from .._util.rng import Stream


def slices(d: int, owners: int) -> list[slice]:
    """The parts of d elements, one for each owner: as equal as possible, empty where d < owners."""
    ends = [d * owner // owners for owner in range(owners + 1)]
    return [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def stream_of_slice(stream: Stream, owner: int) -> Stream:
    return dataclasses.replace(stream, name=f"{stream.name}[{owner}]")


def within(sizes, part: slice) -> tuple[int, ...]:
    """The elements that a slice has of each tensor, those that have none left out. sizes: of the tensors."""
    ends = np.cumsum(sizes)
    inside = np.clip(ends, part.start, part.stop) - np.clip(ends - sizes, part.start, part.stop)
    return tuple(inside[inside > 0].tolist())

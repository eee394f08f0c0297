"""Slices of a bucket, each with an owner: what the communicators that cut a bucket have in common."""

import dataclasses

import numpy as np

from .._util.rng import Stream


def equal_slices(d: int, owners: int) -> list[slice]:
    """Return the slices of a bucket, one for each owner: as equal as possible, and empty where d < owners.

    Args:
        d: Number of elements of the bucket.
        owners: Number of owners.

    Returns:
        The slices, in the order of the owners.
    """
    ends = [d * owner // owners for owner in range(owners + 1)]
    return [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def non_empty(slices: list[slice]) -> list[slice]:
    """Return the slices that have elements: only these have containers.

    Args:
        slices: Some slices.

    Returns:
        Those that are not empty.
    """
    return [part for part in slices if part.stop > part.start]


def stream_of_slice(stream: Stream, owner: int) -> Stream:
    """Return the stream for the slice of one owner.

    Args:
        stream: The stream of the bucket.
        owner: Number of the owner.

    Returns:
        The stream.
    """
    return dataclasses.replace(stream, name=f"{stream.name}[{owner}]")


def sizes_in_slice(sizes: tuple[int, ...], part: slice) -> tuple[int, ...]:
    """Return how many elements of each tensor a slice has.

    Args:
        sizes: Numbers of elements of the tensors in the bucket.
        part: The slice.

    Returns:
        The numbers of elements; tensors without any are left out.
    """
    ends = np.cumsum(sizes)
    inside = np.clip(ends, part.start, part.stop) - np.clip(ends - sizes, part.start, part.stop)
    return tuple(inside[inside > 0].tolist())

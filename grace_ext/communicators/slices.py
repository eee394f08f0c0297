"""Slices of a bucket, each with an owner: what the communicators that cut a bucket have in common."""

import dataclasses
from typing import Any

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


def in_slice(array: Any, part: slice) -> Any:
    """Return what a slice has of a bucket.

    Args:
        array: float32[d], or a list of vectors that together are the bucket.
        part: The slice.

    Returns:
        A view of the array, float32[n]; of a list, the list of such views, those without elements left out.
    """
    if not isinstance(array, list):
        return array[part]
    views, first = [], 0
    for vector in array:
        start, stop = max(part.start - first, 0), min(part.stop - first, vector.size)
        if start < stop:
            views.append(vector[start:stop])
        first += vector.size
    return views


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

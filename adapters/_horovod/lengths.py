"""Payloads that keep their length from step to step, so that Horovod knows their collectives again.

Horovod (0.28.1, response_cache.cc) caches what ranks agreed on for a tensor, by name and shape. A tensor of another shape
than the last time, on any rank, costs an agreement over rank 0: six messages one after the other instead of one. Containers
have a few bytes more or less in each step.
"""

import numpy as np

from grace_ext import ConfigError, ContainerError

_HEAD = 16  # two uint64: the bytes of the payload, and those of all
_ROOM, _MOST = 64, 16  # a new length has 1 / 64 more than it needs, and is kept as long as it has less than 1 / 16


class Lengths:
    """Of one rank's payloads, by the collective's name."""

    def __init__(self):
        self._known: dict[str, int] = {}

    def of(self, name: str, size: int) -> int:
        """How long to make this one of `size` bytes. The first of a name stays as it is: it may be the only one."""
        before = self._known.get(name)
        if before is None:
            self._known[name] = size
        elif not size <= before <= size + size // _MOST:
            self._known[name] = size + size // _ROOM
        return self._known[name]


def padded(payload: np.ndarray, length: int) -> np.ndarray:
    """uint8[m] with its length before it, and what is missing to `length` bytes behind it."""
    room = np.empty(_HEAD + length, np.uint8)
    room[:_HEAD].view("<u8")[:] = payload.size, room.size
    room[_HEAD : _HEAD + payload.size] = payload
    room[_HEAD + payload.size :] = 0
    return room


def without_padding(name: str, received: np.ndarray) -> np.ndarray:
    """What was padded, of all ranks one after the other -> the payloads joined. Raises ContainerError."""
    parts, left = [], received
    while left.size:
        size, length = left[:_HEAD].copy().view("<u8").tolist() if left.size >= _HEAD else (0, 0)
        if not _HEAD + size <= length <= left.size:
            raise ContainerError(f"{name!r}: a payload of {size} bytes in {length}, of which {left.size} came")
        parts.append(left[_HEAD : _HEAD + size])
        left = left[length:]
    return np.concatenate(parts) if parts else received


def as_splits(name: str, sizes: list[int]) -> np.ndarray:
    """Bytes for each rank -> int32[ranks], as Horovod takes them. Raises ConfigError for 2 GiB and more, which have no place
    in one."""
    if max(sizes) > np.iinfo(np.int32).max:
        raise ConfigError(
            f"{name!r}: {max(sizes)} bytes go to one rank, and an alltoall of Horovod takes less than 2 GiB; "
            f"use the communicator 'allgather' for tensors as large as that, or a smaller bucket_bytes"
        )
    return np.array(sizes, np.int32)


def to_itself(payload: np.ndarray, splits: list[int], rank: int, length: int) -> tuple[np.ndarray, list[int]]:
    """An alltoall's payload, uint8[m], and splits, with what is missing to `length` bytes put before the rank's own part:
    it goes to the rank itself and costs nothing."""
    room, missing = np.zeros(length, np.uint8), length - payload.size
    before = sum(splits[:rank])
    room[:before], room[before + missing :] = payload[:before], payload[before:]
    return room, [*splits[:rank], splits[rank] + missing, *splits[rank + 1 :]]


def from_itself(received: np.ndarray, splits: list[int], rank: int, missing: int) -> np.ndarray:
    """What an alltoall brought, without the bytes that `to_itself` had put there. splits: the bytes from each rank."""
    before = sum(splits[:rank])
    return np.concatenate([received[:before], received[before + missing :]])

"""Payloads that keep their length from step to step, for libraries that cache collectives by name and shape.

Horovod (0.28.1, response_cache.cc) caches what ranks agreed on for a tensor, by name and shape. A tensor of another shape
than the last time, on any rank, costs an agreement over rank 0: six messages one after the other instead of one. Containers
have a few bytes more or less in each step.
"""

import numpy as np

from ..errors import ContainerError

_HEAD = 16  # two uint64: the bytes of the payload, and those of all
_MOST = 16  # a length is kept as long as the padding is at most 1 / 16 of the payload


def with_headroom(size: int) -> int:
    """A length that leaves room for a payload that is a little larger.

    Args:
        size: The bytes of a payload.

    Returns:
        1 / 64 more.
    """
    return size + size // 64


class SteadyLengths:
    """The lengths of one rank's payloads, by the collective's name."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def length_for(self, name: str, size: int) -> int:
        """Choose the length of a message. The first of a name has no padding: it may be the only one.

        Args:
            name: The collective's name.
            size: The bytes of the payload.

        Returns:
            The bytes to send, at least `size`.
        """
        before = self._known.get(name)
        if before is None:
            self._known[name] = size
        elif not size <= before <= size + size // _MOST:
            self._known[name] = with_headroom(size)
        return self._known[name]


def pad(payload: np.ndarray, length: int) -> np.ndarray:
    """Put a payload's length before it, and zeros behind it.

    Args:
        payload: uint8[m].
        length: The bytes of payload and zeros together.

    Returns:
        uint8, 16 bytes longer than `length`.
    """
    message = np.zeros(_HEAD + length, np.uint8)
    message[:_HEAD].view("<u8")[:] = payload.size, message.size
    message[_HEAD : _HEAD + payload.size] = payload
    return message


def unpad(name: str, received: np.ndarray) -> np.ndarray:
    """Take the payloads out of what `pad` made.

    Args:
        name: The collective's name, for the error.
        received: The messages of all ranks, one after the other.

    Returns:
        uint8[n], the payloads one after the other.

    Raises:
        ContainerError: A length is not possible.
    """
    parts, left = [], received
    while left.size:
        size, length = left[:_HEAD].copy().view("<u8").tolist() if left.size >= _HEAD else (0, 0)
        if not _HEAD + size <= length <= left.size:
            raise ContainerError(f"{name!r}: a payload of {size} bytes in {length}, of which {left.size} came")
        parts.append(left[_HEAD : _HEAD + size])
        left = left[length:]
    return np.concatenate(parts) if parts else received


def pad_own_part(payload: np.ndarray, splits: list[int], rank: int, length: int) -> tuple[np.ndarray, list[int]]:
    """Pad an alltoall's payload before the part that the rank sends to itself, where it costs nothing.

    Args:
        payload: uint8[m].
        splits: The bytes for each rank.
        rank: This rank.
        length: The bytes to make of it.

    Returns:
        uint8[length], and its splits.
    """
    message, missing = np.zeros(length, np.uint8), length - payload.size
    before = sum(splits[:rank])
    message[:before], message[before + missing :] = payload[:before], payload[before:]
    return message, [*splits[:rank], splits[rank] + missing, *splits[rank + 1 :]]


def unpad_own_part(received: np.ndarray, splits: list[int], rank: int, missing: int) -> np.ndarray:
    """Take what `pad_own_part` had added out of what an alltoall brought.

    Args:
        received: uint8, the parts of all ranks.
        splits: The bytes from each rank.
        rank: This rank.
        missing: How many bytes were added.

    Returns:
        uint8, `missing` bytes shorter.
    """
    before = sum(splits[:rank])
    return np.concatenate([received[:before], received[before + missing :]])

"""What codecs with a scale for each bucket have in common: the size of a bucket as one byte, and the scales."""

import numpy as np

from ..errors import ConfigError, ContainerError

SIZES = tuple(1 << n for n in range(3, 16))


def check_bucket(name: str, bucket: int) -> int:
    """Return `bucket` if it is allowed; otherwise raise ConfigError in the name of the codec."""
    if bucket and bucket not in SIZES:
        raise ConfigError(f"{name}: bucket={bucket}; allowed: 0 (all values), or a power of two from 8 to 32768")
    return bucket


def to_byte(bucket: int) -> int:
    """Return log2 of the bucket's size, 0 for all values."""
    return bucket.bit_length() - 1 if bucket else 0


def from_byte(name: str, byte: int, k: int) -> int:
    """Return the number of values in a bucket, k if the byte is 0. Raises ContainerError."""
    if byte and not 3 <= byte <= 15:
        raise ContainerError(f"{name}: the bucket's size is out of range")
    return 1 << int(byte) if byte else k


def read_floats(name: str, data: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` float32 in uint8[m], aligned. Raises ContainerError if one is missing or not finite."""
    if data.size < 4 * count:
        raise ContainerError(f"{name}: the section is too short for {count} scales")
    floats = np.frombuffer(data[: 4 * count], "<f4").astype(np.float32)
    if not np.isfinite(floats).all():
        raise ContainerError(f"{name}: a scale is not finite")
    return floats

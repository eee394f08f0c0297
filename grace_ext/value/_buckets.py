"""What codecs with a scale a bucket have in common: the size of a bucket in a byte, and the scales."""

import numpy as np

from ..errors import ConfigError, ContainerError

SIZES = tuple(1 << n for n in range(3, 16))


def check_bucket(name: str, bucket: int) -> int:
    """`bucket` if it is allowed; ConfigError in the name of the codec otherwise."""
    if bucket and bucket not in SIZES:
        raise ConfigError(f"{name}: bucket={bucket}; allowed: 0 (all values), or a power of two from 8 to 32768")
    return bucket


def to_byte(bucket: int) -> int:
    """log2 of the bucket's size, 0 for all values."""
    return bucket.bit_length() - 1 if bucket else 0


def from_byte(name: str, byte: int, k: int) -> int:
    """The number of values in a bucket of k. Raises ContainerError."""
    if byte and not 3 <= byte <= 15:
        raise ContainerError(f"{name}: the bucket's size is out of range")
    return 1 << int(byte) if byte else k


def read_floats(name: str, data: np.ndarray, count: int) -> np.ndarray:
    """The first `count` float32 in uint8[m], aligned. Raises ContainerError if there are fewer or one is not finite."""
    if data.size < 4 * count:
        raise ContainerError(f"{name}: the section is too short for {count} scales")
    floats = np.frombuffer(data[: 4 * count], "<f4").astype(np.float32)
    if not np.isfinite(floats).all():
        raise ContainerError(f"{name}: a scale is not finite")
    return floats

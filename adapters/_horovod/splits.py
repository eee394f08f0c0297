"""The bytes that go to each rank in an alltoall, as Horovod takes them."""

import numpy as np

from grace_ext import ConfigError


def as_splits(name: str, sizes: list[int]) -> np.ndarray:
    """Bytes for each rank -> int32[ranks], as Horovod takes them. Raises ConfigError for 2 GiB and more, which have no place
    in one."""
    if max(sizes) > np.iinfo(np.int32).max:
        raise ConfigError(
            f"{name!r}: {max(sizes)} bytes go to one rank, and an alltoall of Horovod takes less than 2 GiB; "
            f"use the communicator 'allgather' for tensors as large as that, or a smaller bucket_bytes"
        )
    return np.array(sizes, np.int32)

"""Buffers of bytes."""

import numpy as np

from ..errors import ContainerError

#: What a container may be given in.
ByteBuffer = np.ndarray | bytes | bytearray | memoryview


def as_bytes(buffer: ByteBuffer) -> np.ndarray:
    """View a buffer as an array, without a copy where it is contiguous.

    Args:
        buffer: uint8[n], bytes, bytearray or memoryview.

    Returns:
        uint8[n].

    Raises:
        ContainerError: It is not a buffer of bytes.
    """
    if isinstance(buffer, np.ndarray):
        if buffer.dtype != np.uint8 or buffer.ndim != 1:
            raise ContainerError(f"a container is uint8[n], not {buffer.dtype} with {buffer.ndim} dimensions")
        return np.ascontiguousarray(buffer)
    try:
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise ContainerError(f"a container is a buffer of bytes, not {type(buffer).__name__}: {error}") from None

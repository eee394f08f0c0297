"""Reused work arrays, one set for each thread.

Fresh arrays would cost a page fault every 4 KiB, which takes longer than the kernels do.
"""

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


class _Thread(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[tuple, np.ndarray] = {}  # by name and dtype


_thread = _Thread()


def scratch(name: str, dtype: npt.DTypeLike, size: int) -> np.ndarray:
    """Return an uninitialised work array, valid until this thread asks for the same name and dtype again.

    Args:
        name: What the array is for.
        dtype: Its dtype.
        size: Number of elements.

    Returns:
        dtype[size].
    """
    array = _thread.arrays.get((name, dtype))
    if array is None or array.size < size:
        array = _thread.arrays[name, dtype] = np.empty(size, dtype)
    return array[:size]


@contextlib.contextmanager
def use_scratch(arrays: dict[tuple, np.ndarray]) -> Iterator[None]:
    """Have this thread take its work arrays from a dict: for work that any thread may do, but only one at a time.

    Args:
        arrays: The work arrays by name and dtype; filled as they are asked for.

    Yields:
        Nothing.
    """
    own, _thread.arrays = _thread.arrays, arrays
    try:
        yield
    finally:
        _thread.arrays = own

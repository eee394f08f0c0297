"""Reused work arrays, one set a thread: fresh ones would cost a page fault every 4 KiB, more than the kernels do."""

import contextlib
import threading

import numpy as np


class _Thread(threading.local):
    def __init__(self):
        self.arrays: dict[tuple, np.ndarray] = {}  # by name and dtype


_thread = _Thread()


def scratch(name: str, dtype, size: int) -> np.ndarray:
    """An uninitialised array that is valid until this thread asks for the same name and dtype again."""
    array = _thread.arrays.get((name, dtype))
    if array is None or array.size < size:
        array = _thread.arrays[name, dtype] = np.empty(size, dtype)
    return array[:size]


@contextlib.contextmanager
def use_scratch(arrays: dict[tuple, np.ndarray]):
    """Inside, this thread takes its work arrays from the dict: for work that any thread may do, but one at a time."""
    own, _thread.arrays = _thread.arrays, arrays
    try:
        yield
    finally:
        _thread.arrays = own

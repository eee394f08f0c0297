"""Reused work arrays, one set a thread: fresh ones would cost a page fault every 4 KiB, more than the kernels do."""

import threading

import numpy as np

_arrays = threading.local()


def scratch(name: str, dtype, size: int) -> np.ndarray:
    """An uninitialised array that is valid until this thread asks for the same name again."""
    array = getattr(_arrays, name, None)
    if array is None or array.size < size:
        array = np.empty(size, dtype)
        setattr(_arrays, name, array)
    return array[:size]

"""Arrays that show or forbid that a kernel reads or writes outside them."""

import ctypes
import mmap
import os
import resource

import numpy as np

GUARD = 0xA5


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(size, dtype=np.uint8):
    """An array between two guard zones, and a function that tells whether they are untouched."""
    whole = np.full((size + 128) * np.dtype(dtype).itemsize, GUARD, np.uint8).view(dtype)
    before = whole.copy()
    return (
        whole[64 : 64 + size],
        lambda: (
            whole[:64].tobytes() == before[:64].tobytes() and whole[64 + size :].tobytes() == before[64 + size :].tobytes()
        ),
    )


class Fence:
    """Copies of arrays whose last byte is the last one before a forbidden page."""

    def __init__(self):
        self.kept = []

    def __call__(self, array):
        array = np.ascontiguousarray(array)
        room = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        whole = np.frombuffer(memory, np.uint8)
        assert LIBC.mprotect(whole.ctypes.data + room, mmap.PAGESIZE, 0) == 0
        self.kept.append((memory, whole))
        copy = whole[room - array.nbytes : room].view(array.dtype)
        copy[:] = array
        return copy


def survives(function, *args):
    """Whether function(fence, *args) returns True in a child process, which is gone afterwards."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        result = False
        try:
            result = function(Fence(), *args)
        finally:
            os._exit(0 if result else 1)
    return os.waitpid(child, 0)[1] == 0

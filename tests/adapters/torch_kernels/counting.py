"""What kernels load, store and change atomically, counted by Triton's interpreter."""

import collections
import contextlib
import threading
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from grace_ext.adapters._torch.kernels import accumulate, packed, qsgd, radix, rice, topk
from grace_ext.adapters._torch.kernels._launch import launch


@contextlib.contextmanager
def counted():
    """Yields a Counter: bytes by kernel, while the context lasts. Atomic operations count twice."""
    found = collections.Counter()

    def count(factor):
        def add(kernel, pointers, mask):
            item = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
            found[kernel] += factor * item * int(np.sum(mask.data))

        return add

    seen = {"create_masked_load": count(1), "create_masked_store": count(1), "create_atomic_rmw": count(2)}
    with _watched(seen):
        yield found


@contextlib.contextmanager
def addresses_read():
    """Yields a dict: the addresses that a kernel has loaded from so far, uint64[m] in a list, by kernel."""
    found = collections.defaultdict(list)

    def keep(kernel, pointers, mask):
        found[kernel].append(pointers.data[mask.data])

    with _watched({"create_masked_load": keep}):
        yield found


#: Places of the pointers and the mask among the arguments of the interpreter's operations.
_ARGUMENTS = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}


@contextlib.contextmanager
def _watched(seen):
    """seen: functions by name of an operation, each called with the kernel's name, pointers and mask before it is done."""
    current = threading.local()  # ranks are threads
    builder = interpreter.InterpreterBuilder

    def watching(name, see):
        plain, (pointers_at, mask_at) = getattr(builder, name), _ARGUMENTS[name]

        def call(self, *arguments):
            see(getattr(current, "kernel", ""), arguments[pointers_at], arguments[mask_at])
            return plain(self, *arguments)

        return call

    def named(kernel, *arguments, **constants):
        current.kernel = kernel.fn.__name__
        launch(kernel, *arguments, **constants)

    with contextlib.ExitStack() as stack:
        for module in (accumulate, packed, qsgd, radix, rice, topk):
            stack.enter_context(mock.patch.object(module, "launch", named))
        for name, see in seen.items():
            stack.enter_context(mock.patch.object(builder, name, watching(name, see)))
        yield


class NotCopied(torch.Tensor):
    """A tensor that tells what it is and where it lies; whatever else torch is to do with it raises."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        if name not in {"__get__", "data_ptr", "is_contiguous", "numel"}:
            raise AssertionError(f"{name} of a tensor that only kernels should read")
        return super().__torch_function__(function, types, args, kwargs or {})

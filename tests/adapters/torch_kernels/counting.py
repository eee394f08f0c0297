"""What kernels load, store and change atomically, counted by Triton's interpreter."""

import collections
import contextlib
from unittest import mock

import numpy as np
from triton.runtime import interpreter

from grace_ext.adapters._torch.kernels import accumulate, packed, qsgd, radix, rice, topk
from grace_ext.adapters._torch.kernels._launch import launch


@contextlib.contextmanager
def counted():
    """Yields a Counter: bytes by kernel, while the context lasts. Atomic operations count twice."""
    found, current = collections.Counter(), [""]
    builder = interpreter.InterpreterBuilder
    plain = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw")}

    def counting(name, pointers_at, mask_at, factor):
        def call(self, *arguments):
            item = interpreter._get_np_dtype(arguments[pointers_at].get_element_ty()).itemsize
            found[current[0]] += factor * item * int(np.sum(arguments[mask_at].data))
            return plain[name](self, *arguments)

        return call

    def named(kernel, *arguments, **constants):
        current[0] = kernel.fn.__name__
        launch(kernel, *arguments, **constants)

    with contextlib.ExitStack() as stack:
        for module in (accumulate, packed, qsgd, radix, rice, topk):
            stack.enter_context(mock.patch.object(module, "launch", named))
        for name, where in (
            ("create_masked_load", (0, 1, 1)),
            ("create_masked_store", (0, 2, 1)),
            ("create_atomic_rmw", (1, 3, 2)),
        ):
            stack.enter_context(mock.patch.object(builder, name, counting(name, *where)))
        yield found

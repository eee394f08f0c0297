"""Where buckets' results are written, and how they become gradients."""

import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch

from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.row_buckets import RowBucket, RowGradient
from grace_ext.memory.arrays import NumpyArrays

from .device import TorchBucket
from .taken import TakenGradient


class OutputBuffer:
    """The memory of one bucket's results, over many steps. Gradients are views of it, and users may keep these.

    out: the array that Exchange.finish writes to: a float32[size] of numpy, or of torch for a TorchBucket, or a RowGradient, whose
    arrays are new in each step.
    """

    def __init__(self, bucket: Bucket, lends: bool = False):
        """lends: whether it is the bucket's Lender (grace_ext.exchange.buckets) while no gradients are views of it."""
        self._bucket, self._lends = bucket, lends and not isinstance(bucket, RowBucket | TorchBucket)
        self._make()

    def _make(self) -> None:
        self._borrowed: Callable = lambda: None  # by nobody
        self._hands_on = False
        self.out = None  # what was there may be used for it
        if isinstance(self._bucket, RowBucket):
            self.out = RowGradient()
        elif isinstance(self._bucket, TorchBucket):
            self.out = torch.zeros(self._bucket.size, dtype=torch.float32, device=self._bucket.device)
        else:
            self.out = NumpyArrays.zeros(self._bucket.size)

    def borrow(self) -> torch.Tensor:
        """float32[size], of which users will get views. Not for buckets of rows."""
        if isinstance(self.out, torch.Tensor):
            # Nobody tells when it is released; torch's caching allocator gives the next one without cost.
            self._borrowed = lambda: True
            return self.out
        # A tensor keeps the array alive that it was made from, and so does all that shares the tensor's memory. The views
        # that are handed out go when the next zero_grad() drops the gradients, unless somebody has kept one.
        array = self.out[:]
        self._borrowed = weakref.ref(array)
        if self._hands_on:
            self.out = None
        return torch.from_numpy(array)

    def clear(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Before it is written to: if somebody still has views of an earlier step, `out` becomes other memory. Views that are
        the parameters' current gradients do not count: after zero_grad(set_to_none=False) backward has written to these."""
        if self.out is None or (
            self._borrowed() is not None and not all(self._has(p.grad) for p in parameters if _gets_view(p))
        ):
            self._make()
        self._bucket.lender = self if self._lends and self._borrowed() is None else None

    def lend(self, own: np.ndarray | None) -> None:
        """Lend the bucket other memory in this step, float32[size], which nobody else uses; None for what it has. The result is handed on
        whole then, so that nothing of it is kept when the gradients are dropped."""
        if own is not None:
            self.out, self._borrowed, self._hands_on = own, lambda: None, True

    def release(self) -> None:
        """Free the memory, because the bucket is not used any more."""
        self.out = self._bucket.lender = None

    def _has(self, gradient: torch.Tensor | None) -> bool:
        address = self.out.data_ptr() if isinstance(self.out, torch.Tensor) else self.out.__array_interface__["data"][0]
        return gradient is not None and gradient.layout == torch.strided and gradient.untyped_storage().data_ptr() == address


def to_gradient_layout(p: torch.nn.Parameter, result: torch.Tensor) -> torch.Tensor:
    """A contiguous result, of p's shape, as p.grad: of p's dtype, on its device, and laid out in memory as autograd lays it
    out, because torch's fused optimizers walk through memory. A view where that is possible; else what p.grad is now, with
    the result in it, if that fits. Sparse ones stay as they are."""
    if result.layout != torch.strided:
        return result
    if p.is_contiguous():  # strides of dimensions of one element can be anything
        laid_out = result if result.stride() == p.stride() else result.as_strided(p.shape, p.stride())
        return laid_out.to(p.device, p.dtype)
    buffer, strides = p.grad, p.stride() if is_non_overlapping_and_dense(p) else result.stride()
    kind = p.layout, p.dtype, p.device
    # Not all sparse layouts have strides.
    if (
        buffer is None
        or isinstance(buffer, TakenGradient)
        or (buffer.layout, buffer.dtype, buffer.device) != kind
        or buffer.stride() != strides
    ):
        buffer = torch.empty_strided(p.shape, strides, dtype=p.dtype, device=p.device)
    return buffer.detach().copy_(result)


def is_non_overlapping_and_dense(p: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order. Then gradients are laid out in the same order, else
    contiguously."""
    return torch.empty_like(p, device="meta").stride() == p.stride()


def _gets_view(p: torch.nn.Parameter) -> bool:
    return p.is_contiguous() and p.dtype == torch.float32

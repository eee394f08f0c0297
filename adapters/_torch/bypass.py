"""Gradients that bypass the exchange: each by the library's own allreduce, in place, as if grace_ext were not there."""

import numpy as np
import torch

from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.bypass import BypassPending
from grace_ext.exchange.engine import Exchange
from grace_ext.transport import CollectiveHandle


class BypassBucket:
    """The gradients of one bucket in one step."""

    def __init__(self, exchange: Exchange, bucket: Bucket, prescale: float):
        """prescale: what gradients are multiplied with before the sum."""
        self._transport, self._bucket, self._half = exchange.transport, bucket, exchange.bypass_dtype(bucket) == "fp16"
        self._factors = prescale, exchange.weight
        self._on_gradient = exchange.gradient_callback(bucket)
        self._seen = np.zeros(bucket.size, np.float32) if self._on_gradient else None
        self._ends = np.cumsum(bucket.sizes)
        #: By the tensor's number in the bucket: handle, what was sent, its float32 vector, the gradient.
        self._sent: dict[int, tuple] = {}

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Start reducing one of the bucket's gradients, float32 and not sparse, in place."""
        if number in self._sent:
            return
        flat = gradient.reshape(-1)
        if self._on_gradient:
            end = self._ends[number]
            self._seen[end - flat.numel() : end] = flat.cpu()
        sent = flat.half() if self._half else flat
        handle = self._transport.sum_tensor(f"{self._bucket.name}.{number}", sent, *self._factors)
        self._sent[number] = handle, sent, flat, gradient

    def pending(self) -> BypassPending:
        """For Exchange.submit_bypass, once all of the bucket's gradients are added."""
        if self._on_gradient:
            self._on_gradient(self._seen, None)
        sent = sum(sent.nbytes for _, sent, _, _ in self._sent.values())
        return BypassPending(CollectiveHandle(self._wait), sent, {})

    def _wait(self) -> None:
        for handle, sent, flat, gradient in self._sent.values():
            handle.wait()
            if sent is not flat:
                flat.copy_(sent)
            if flat.data_ptr() != gradient.data_ptr():
                gradient.copy_(flat.view(gradient.shape))

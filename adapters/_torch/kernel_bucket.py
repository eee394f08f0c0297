"""Buckets on an accelerator whose gradients are encoded and decoded there, by kernels. It imports Triton."""

import functools

import numpy as np
import torch

from grace_ext.pipeline.container import Container
from grace_ext.pipeline.decoder import sum_at

from . import device_decoder, device_encoder
from .device import TorchBucket
from .kernels import accumulate, on_device
from .kernels.sketch import Sketcher
from .mailbox import to_device, to_host


class KernelBucket(TorchBucket):
    """A bucket on an accelerator, exchanged by allgather: top-k, or dense with a value codec that has kernels.

    Memories with hooks get sketches, and the elements of the result that are not zero.
    """

    serves_hooks = True

    @staticmethod
    def can_encode(compressor) -> bool:
        return device_encoder.fits(compressor)

    def _encode(self, dense, residual, stream, started):
        with on_device(self.device):
            return device_encoder.encode(self.compressor, dense, residual, stream, started, self.sizes)

    @functools.cached_property
    def _sketcher(self) -> Sketcher:
        return Sketcher(self.sizes, self.device)

    def _correct(self, dense, stream):
        sketches = None
        if self._sketch_size:
            with on_device(self.device):
                sketches = to_host(self._sketcher.sketches(dense, stream.shared().key())).reshape(-1)
        self.memory.correct_at(self.name, dense, self._arrays)
        return sketches

    @property
    def _shows_received(self) -> bool:
        return self.memory.has_hooks and self.memory.receives_at_positions

    def finish(self, pending, transport, out, weight):
        finite = super().finish(pending, transport, out, weight)
        if finite and self._shows_received:
            factor = self.memory.on_received_at(self.name, *self._received, weight * transport.size)
            if factor != 1:
                out *= factor
        if finite:
            self._show(out, weight * transport.size)
        return finite

    def _decode_sum(self, containers: list[Container], out: torch.Tensor, weight: float) -> bool:
        with on_device(self.device):
            if not self._shows_received or any(one.non_finite for one in containers):
                return device_decoder.decode_sum(containers, out, weight)
            # The memory has to know the elements, so the host sums them, and the device gets the sums.
            at, sums = sum_at(containers, self.size, weight)
            out.zero_()
            accumulate.add(out, to_device(at.view(np.int32), self.device), to_device(sums, self.device), 1.0)
        self._received = at, sums
        return True

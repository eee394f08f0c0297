"""Buckets on an accelerator whose gradients are encoded and decoded there, by kernels. It imports Triton."""

import functools

import numpy as np
import torch

from grace_ext._util.rng import Stream
from grace_ext.communicators.base import Communicator, Pending
from grace_ext.memory import Memory
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.decoder import sum_at
from grace_ext.transport.base import Transport

from . import device_encoder
from .device import TorchBucket
from .device_place import DevicePlace
from .kernels import accumulate, on_device, topk
from .kernels.parts import Layout, Parts
from .kernels.sketch import Sketcher
from .mailbox import to_device, to_host


class KernelBucket(TorchBucket):
    """A bucket on an accelerator that kernels encode: top-k, or dense with a value codec that has kernels.

    Where its communicator sums on the way, kernels sum and encode the sums, too. Memories with hooks get sketches, and the elements
    of the result that are not zero.
    """

    communicators = ("allgather", "sharded", "tree", "reduce_scatter", "hierarchical", "auto", "allreduce", "majority")
    serves_hooks = True
    place = DevicePlace

    @classmethod
    def fits(cls, compressor: Compressor, communicator: Communicator, memory: Memory) -> bool:
        needs_containers = memory.has_hooks and memory.receives_at_positions
        return super().fits(compressor, communicator, memory) and (communicator.name == "allgather" or not needs_containers)

    @staticmethod
    def can_encode(compressor: Compressor, communicator: Communicator) -> bool:
        return compressor.dense if communicator.name == "allreduce" else device_encoder.fits(compressor)

    def _begin(self) -> tuple[torch.Tensor, tuple | None]:
        if not (self.memory.keeps_rounded and self._reads_once):
            return super()._begin()
        residual, following = self.memory.begin_rounded(self.name, self.size, self._arrays)
        return self._arrays.empty(self.size), (residual.halves, following.halves)

    @property
    def takes_parts(self) -> bool:
        return self._reads_once and self.memory.stateful and not self.memory.corrects_gradient

    @property
    def _reads_once(self) -> bool:
        return self.communicator.name == "allgather" and device_encoder.reads_once(self.compressor)

    @functools.cached_property
    def _layout(self) -> Layout:
        return topk.parts_layout(self.sizes)

    def _joined(self, parts: list[torch.Tensor]) -> Parts:
        return Parts(parts, self._layout)

    @functools.cached_property
    def _sketcher(self) -> Sketcher:
        return Sketcher(self.sizes, self.device)

    def _sketch(self, dense: torch.Tensor, stream: Stream) -> np.ndarray:
        with on_device(self.device):
            return to_host(self._sketcher.sketches(dense, stream.shared().key())).reshape(-1)

    def _finish(self, pending: Pending, transport: Transport, out: torch.Tensor, weight: float) -> bool:
        if not (self.memory.has_hooks and self.memory.receives_at_positions):
            return super()._finish(pending, transport, out, weight)
        finite = self.communicator.receive(pending, transport, self.size)
        if not finite:
            self.communicator.decode(pending, out, weight)
            return False
        # The memory has to know the elements, so the host sums them, and the device gets the sums.
        at, sums = sum_at(pending.containers, self.size, weight)
        pending.containers = []
        with on_device(self.device):
            out.zero_()
            accumulate.add(out, to_device(at.view(np.int32), self.device), to_device(sums, self.device), 1.0)
        self._receive_sketch(pending, weight)
        factor = self.memory.on_received_at(self.name, at, sums, weight * transport.size)
        if factor != 1:
            out *= factor
        return True

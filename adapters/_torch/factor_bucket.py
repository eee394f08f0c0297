"""Buckets on an accelerator whose gradients are multiplied with low-rank factors there. It imports Triton."""

from collections.abc import Sequence

import numpy as np
import torch

from grace_ext._util.rng import Stream
from grace_ext.communicators.base import Communicator, Pending
from grace_ext.kernels import NON_FINITE
from grace_ext.lowrank.matrices import Matrices
from grace_ext.memory import Memory
from grace_ext.pipeline.compressor import Compressor
from grace_ext.transport.base import Transport

from .device import TorchBucket
from .kernels import lowrank
from .mailbox import to_device, to_host


class TorchMatrices(Matrices):
    """Matrices in tensors of a device: torch multiplies what is summed afterwards, a kernel what has to be the same everywhere."""

    def __init__(self, device: str):
        self._device = device

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._device)

    @staticmethod
    def add(gradient: torch.Tensor, residual: torch.Tensor | None) -> bool:
        if residual is not None:
            gradient += residual
        return True  # that it is not finite shows in the projections

    @staticmethod
    def to_host(message: torch.Tensor) -> np.ndarray:
        return to_host(message).copy()

    def place(self, factor: np.ndarray) -> torch.Tensor:
        return to_device(factor, self._device)

    @staticmethod
    def project(matrix: torch.Tensor, basis: torch.Tensor, out: torch.Tensor) -> None:
        torch.matmul(matrix, basis.T, out=out)

    @staticmethod
    def project_back(pt: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
        torch.matmul(pt, matrix, out=out)

    def expand(
        self,
        pt: torch.Tensor,
        qt: torch.Tensor,
        weight: np.float32,
        out: torch.Tensor,
        own: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        largest = torch.zeros(1, dtype=torch.int32, device=self._device)
        lowrank.expand(pt, qt, own, float(weight), out, residual, largest)
        return largest

    def write(self, out: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        placed = out.copy_(to_device(values, self._device)).view(torch.int32)
        return (placed & 0x7FFFFFFF).amax().reshape(1) if out.numel() else placed.new_zeros(1)

    @staticmethod
    def all_finite(found: Sequence[torch.Tensor]) -> bool:
        return bool(to_host(torch.cat(list(found))).max() < NON_FINITE)


class FactorBucket(TorchBucket):
    """A bucket of a low-rank method on an accelerator: only factors, and tensors that are sent as they are, cross."""

    communicators = ("factors",)
    serves_hooks = True  # of residuals in fewer bits, which are packed at the end of the step
    place = TorchMatrices

    @classmethod
    def fits(cls, compressor: Compressor, communicator: Communicator, memory: Memory) -> bool:
        return super().fits(compressor, communicator, memory) and not memory.corrects_gradient

    @staticmethod
    def can_encode(compressor: Compressor, communicator: Communicator) -> bool:
        return compressor.lowrank is not None

    def start_empty(self, transport: Transport, stream: Stream) -> Pending:
        with torch.cuda.stream(self.stream):
            zeros = torch.zeros(self.size, dtype=torch.float32, device=self.device)
            pending = self.communicator.start(transport, self.name, self.compressor, zeros, None, stream, self.sizes)
        pending.gradient_bytes = 0
        return pending

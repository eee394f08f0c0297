"""Buckets on an accelerator whose gradients are encoded and decoded there, by kernels. It imports Triton."""

import torch

from grace_ext.pipeline.container import Container

from . import device_decoder, device_encoder
from .device import TorchBucket


class KernelBucket(TorchBucket):
    """A bucket on an accelerator, exchanged by allgather: top-k, or dense with a value codec that has kernels."""

    @staticmethod
    def can_encode(compressor) -> bool:
        return device_encoder.fits(compressor)

    def _encode(self, dense, residual, stream, started):
        with self._on_device():
            return device_encoder.encode(self.compressor, dense, residual, stream, started)

    def _decode_sum(self, containers: list[Container], out: torch.Tensor, weight: float) -> bool:
        with self._on_device():
            return device_decoder.decode_sum(containers, out, weight)

    def _on_device(self):
        """Triton launches on the current device."""
        return torch.cuda.device(self.device if torch.device(self.device).type == "cuda" else -1)

"""Vectors in 8 or 16 bits an element on an accelerator. It imports Triton."""

import torch

from grace_ext.memory.packed_vector import PackedVector

from .kernels import half, on_device, packed


class TorchPackedVector(PackedVector):
    """A vector in fewer bits, as tensors of a device.

    Args:
        size: Number of elements, all of them zeros.
        bits: 8 or 16.
        device: The device.
    """

    def __init__(self, size: int, bits: int, device: str):
        self._device = device
        super().__init__(size, bits)

    @property
    def halves(self) -> torch.Tensor:
        """The elements where they are kept, bfloat16[size]. Only with 16 bits."""
        return self._codes.view(torch.bfloat16)

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._device)

    def _zeros(self, size: int, dtype: str) -> torch.Tensor:
        return torch.zeros(size, dtype=getattr(torch, dtype), device=self._device)

    def _unpack(self, codes: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
        with on_device(self._device):
            if scales is None:
                half.decode(codes, out, brain=True)
            else:
                packed.unpack(codes, scales, out)

    def _pack(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None) -> None:
        with on_device(self._device):
            packed.pack(values, codes, scales)

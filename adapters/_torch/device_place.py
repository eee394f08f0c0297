"""The place of tensors on a device, where kernels encode and decode. It imports Triton."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from grace_ext._util.rng import Stream
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.container import Container
from grace_ext.pipeline.square_sums import SquareSums

from . import device_decoder, device_encoder
from .kernels import on_device
from .kernels.parts import Parts
from .mailbox import to_host
from .torch_place import TorchPlace


class DevicePlace(TorchPlace):
    """Tensors of a device. What a rank without data sends in the place of a gradient has no kernels, and is encoded on the host."""

    def encode(
        self,
        compressor: Compressor,
        gradient: torch.Tensor | Parts,
        stream: Stream,
        *,
        state: tuple | None,
        sizes: tuple[int, ...] | None,
    ) -> Any:
        if state is None and not device_encoder.fits(compressor):
            return compressor.encode(to_host(gradient).copy(), stream, sizes=sizes)
        residual, following = state or (None, None)
        if following is gradient:
            following = None
        elif following is not None and following.dtype == torch.bfloat16:
            following = following.view(torch.int16)
        with on_device(self._device):
            encoded = device_encoder.encode(
                compressor, gradient, residual, stream, time.perf_counter(), sizes, following=following
            )
        return encoded if encoded.support is None else encoded._replace(support=encoded.support.long())

    def encode_in_place(
        self, compressor: Compressor, summed: torch.Tensor, stream: Stream, *, sizes: tuple[int, ...] | None
    ) -> Any:
        with on_device(self._device):
            return device_encoder.encode(compressor, summed, None, stream, time.perf_counter(), sizes, in_place=True)

    def add_all(self, containers: list[Container], accumulator: torch.Tensor) -> None:
        if any(one.non_finite for one in containers):
            accumulator.fill_(torch.nan)
            return
        with on_device(self._device):
            if any(one.transform for one in containers):
                summed = self.empty("summed", len(accumulator))
                device_decoder.decode_sum(containers, summed, 1.0)
                accumulator += summed
            else:
                device_decoder.add_each([(one, accumulator) for one in containers], 1.0)

    def decode_slices(self, slices: Sequence[tuple[slice, list[Container]]], out: torch.Tensor, weight: float) -> None:
        with on_device(self._device):
            if any(one.transform for _, containers in slices for one in containers):
                for part, containers in slices:
                    device_decoder.decode_sum(containers, out[part], weight)
                return
            out.zero_()
            device_decoder.add_each([(one, out[part]) for part, containers in slices for one in containers], weight)

    def decode_sum(self, containers: list[Container], out: torch.Tensor, weight: float, squares: SquareSums | None) -> None:
        with on_device(self._device):
            device_decoder.decode_sum(containers, out, weight)

"""Buckets on an accelerator whose communicator encodes parts of a gradient and sums containers, there. It imports Triton."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from grace_ext._util.rng import Stream
from grace_ext.communicators.base import Communicator, Pending
from grace_ext.communicators.places import Place
from grace_ext.exchange.buckets import Bucket
from grace_ext.memory import Memory
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.container import Container
from grace_ext.transport.base import Transport

from . import device_decoder, device_encoder
from .device import PlacedBucket
from .kernel_bucket import KernelBucket
from .kernels import on_device
from .mailbox import to_host


class DevicePlace(Place):
    """Tensors of a device. What a rank without data sends in the place of a gradient has no kernels, and is encoded on the host."""

    def __init__(self, device: str):
        self._device = device

    def empty(self, what: str, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._device)

    def zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self._device)

    @staticmethod
    def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.add(a, b, out=out)

    def encode(
        self,
        compressor: Compressor,
        gradient: torch.Tensor,
        state: tuple | None,
        stream: Stream,
        sizes: tuple[int, ...] | None,
    ) -> Any:
        if state is None and not device_encoder.fits(compressor):
            return compressor.encode(to_host(gradient).copy(), stream, sizes=sizes)
        residual = None if state is None else state[0]
        with on_device(self._device):
            return device_encoder.encode(compressor, gradient, residual, stream, time.perf_counter(), sizes)

    def encode_in_place(
        self, compressor: Compressor, summed: torch.Tensor, stream: Stream, sizes: tuple[int, ...] | None
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


class SummingBucket(PlacedBucket, KernelBucket):
    """A bucket on an accelerator, exchanged by communicator `sharded`, `tree` or `reduce_scatter`. Only containers cross."""

    communicators = ("sharded", "tree", "reduce_scatter")

    @classmethod
    def fits(cls, compressor: Compressor, communicator: Communicator, memory: Memory) -> bool:
        return super().fits(compressor, communicator, memory) and not (memory.has_hooks and memory.receives_at_positions)

    @classmethod
    def made_of(cls, bucket: Bucket) -> "SummingBucket":
        summing: Any = bucket.communicator
        return cls(bucket.name, bucket.tensors, bucket.compressor, summing.at(DevicePlace(bucket.device)), bucket.memory)

    def start_empty(self, transport: Transport, stream: Stream) -> Pending:
        with torch.cuda.stream(self.stream):
            return super().start_empty(transport, stream)

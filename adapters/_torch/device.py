"""Buckets of tensors that live on an accelerator: selected and summed there.

With Triton, kernels do it all (kernel_bucket.py). Without, torch operations select and sum, for top-k alone (torch_place.py). The
bytes are those that the host kernels would make: the selection is exact, with ties going to the lowest index.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from grace_ext import ConfigError
from grace_ext._util.rng import Stream
from grace_ext.communicators.base import Communicator, Pending, wait
from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.row_buckets import RowBucket
from grace_ext.memory import Memory
from grace_ext.memory.packed_vector import PackedVector
from grace_ext.pipeline import container
from grace_ext.pipeline.compressor import Compressor
from grace_ext.transport.base import Transport

from .mailbox import to_host
from .torch_place import TorchPlace


class TorchArrays:
    """Keeps a memory's state as torch tensors on one device; see grace_ext.memory.arrays.Arrays."""

    def __init__(self, device: str):
        self.device = device

    def zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self.device)

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=self.device)

    def packed(self, size: int, bits: int) -> PackedVector:
        from .packed_vector import TorchPackedVector

        return TorchPackedVector(size, bits, self.device)

    @staticmethod
    def to_host(array: torch.Tensor) -> np.ndarray:
        return array.cpu().numpy().copy()

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    @staticmethod
    def to_sign(array: torch.Tensor) -> None:
        array.sign_()

    def add_container(self, blob: np.ndarray, array: torch.Tensor) -> None:
        from .device_decoder import decode_sum
        from .kernels import on_device

        own = torch.empty_like(array)
        with on_device(self.device):
            decode_sum([container.parse(blob)], own, 1.0)
        array += own

    @staticmethod
    def clipping(array: torch.Tensor, largest: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(array, dtype=torch.float64)
        return torch.where(norm > largest, largest / norm, 1.0)

    @staticmethod
    def clip(array: torch.Tensor, deviations: float) -> None:
        if len(array):
            limit = (array.double().std(correction=0) * deviations).float()
            torch.clamp(array, -limit, limit, out=array)

    @staticmethod
    def accumulate(average: torch.Tensor, values: torch.Tensor, momentum: float, share: float) -> None:
        average *= momentum
        average += values * share

    @staticmethod
    def to_root(array: torch.Tensor, least: float) -> None:
        # In float64, since some libraries round a root of float32 to the one neighbor or the other.
        array.copy_(array.clamp(min=least).double().sqrt_())

    @staticmethod
    def total(array: torch.Tensor) -> float:
        return float(to_host(array.sum(dtype=torch.float64)))

    @staticmethod
    def normalized(matrix: torch.Tensor, least: float) -> torch.Tensor:
        return matrix / torch.linalg.norm(matrix).clamp(min=least)


class TorchBucket(Bucket):
    """A bucket on an accelerator, encoded and summed by torch operations there: the top-k of whole buckets, by allgather."""

    communicators: tuple[str, ...] = ("allgather",)  #: Names of those that can exchange such a bucket.
    serves_hooks = False  #: Whether memories that work at positions can have such a bucket.
    place: Callable[[str], Any] = TorchPlace  #: Makes what the communicator needs, of a device.

    def __post_init__(self):
        super().__post_init__()
        self._arrays = TorchArrays(self.device)
        #: The stream that has the gradients of the step; None for the thread's current one.
        self.stream: torch.cuda.Stream | None = None

    @functools.cached_property
    def _gradient(self) -> torch.Tensor:
        """Where pack writes to if the memory has no array for it."""
        return self._arrays.zeros(self.size)

    @classmethod
    def fits(cls, compressor: Compressor, communicator: Communicator, memory: Memory) -> bool:
        """Whether such a bucket can have these parts; otherwise the whole gradient is copied to the host."""
        if communicator.name not in cls.communicators or not cls.can_encode(compressor, communicator):
            return False
        return not memory.has_hooks or cls.serves_hooks and memory.works_at_positions(compressor)

    @classmethod
    def made_of(cls, bucket: Bucket) -> Self:
        """Make such a bucket of one that fits."""
        communicator: Any = bucket.communicator
        return cls(bucket.name, bucket.tensors, bucket.compressor, communicator.at(cls.place(bucket.device)), bucket.memory)

    @staticmethod
    def can_encode(compressor: Compressor, communicator: Communicator) -> bool:
        return (
            compressor.transform is None and compressor.sparsifier.name == "topk" and compressor.sparsifier.per == "bucket"
        )

    def start(self, transport, pack, stream, on_gradient=None, on_compensated_gradient=None):
        """on_gradient gets tensors of the device, on_compensated_gradient copies on the host."""
        with torch.cuda.stream(self.stream):
            return self._start(transport, pack, stream, on_gradient, on_compensated_gradient)

    def _start(self, transport, pack, stream, on_gradient, on_compensated_gradient):
        given, state = self._begin()
        parts = pack(given)
        given = self._joined(parts) if isinstance(parts, list) else given
        if on_gradient:
            on_gradient(_as_one(given), state and state[0].float())
        sketch = self._correct(given, transport.size, stream) if self.memory.corrects_gradient else None
        if on_compensated_gradient:
            on_compensated_gradient(to_host(_as_one(given)), state and to_host(state[0].float()))
        pending = self.communicator.start(transport, self.name, self.compressor, given, state, stream, self.sizes)
        self.memory.on_sent(self.name, pending)
        self._start_sketch(pending, transport, sketch)
        return pending

    @property
    def takes_parts(self) -> bool:
        return False

    def _joined(self, parts: list[torch.Tensor]) -> Any:
        """The gradient that lies in tensors, if the bucket `takes_parts`."""
        raise NotImplementedError

    def _begin(self) -> tuple[torch.Tensor, tuple | None]:
        """An array for the gradient, and what the communicator gets of the memory: the residual and a buffer for the next one."""
        state = self.memory.begin(self.name, self.size, self._arrays) if self.communicator.needs_memory else None
        return self._gradient if state is None else state[1], state

    def _correct(self, dense: torch.Tensor, ranks: int, stream: Stream) -> np.ndarray | None:
        """Let the memory change the gradient. Returns sketches of what it was, float32[8 * tensors], if the memory wants some."""
        sketch = self._sketch(dense, stream) if self._sketch_size else None
        self.memory.correct_at(self.name, dense, self.sizes, ranks, self._arrays)
        return sketch

    def _sketch(self, dense: torch.Tensor, stream: Stream) -> np.ndarray:
        raise NotImplementedError

    def start_empty(self, transport: Transport, stream: Stream) -> Pending:
        with torch.cuda.stream(self.stream):
            return super().start_empty(transport, stream)

    def advance(self, pending: Pending, transport: Transport) -> None:
        with torch.cuda.stream(self.stream):
            super().advance(pending, transport)

    def finish(self, pending: Pending, transport: Transport, out: torch.Tensor, weight: float) -> bool:
        if pending.bypasses:
            wait(pending)
            return True
        with torch.cuda.stream(self.stream):
            finite = self._finish(pending, transport, out, weight)
            self._receive_sketch(pending, weight)
            if finite and self.memory.receives_anywhere:
                self.memory.on_received_anywhere(self.name, out, weight * transport.size, self._arrays)
        return finite

    def _finish(self, pending: Pending, transport: Transport, out: torch.Tensor, weight: float) -> bool:
        return self.communicator.finish(pending, transport, out, weight)


def _as_one(gradient: Any) -> torch.Tensor:
    return gradient if isinstance(gradient, torch.Tensor) else gradient.joined()


def bucket_classes(device: str) -> list[type[TorchBucket]]:
    """The classes of buckets on a device: those with kernels, where Triton is installed and can run them there."""
    if importlib.util.find_spec("triton") is None:
        return [TorchBucket]
    from .kernels import usable

    if not usable(device):
        return [TorchBucket]
    from .device_rows import DeviceRowBucket
    from .factor_bucket import FactorBucket
    from .kernel_bucket import KernelBucket

    return [KernelBucket, FactorBucket, DeviceRowBucket]


def on_its_device(bucket: Bucket, selection: str, small: Compressor | None) -> Bucket:
    """The same bucket for an accelerator, if it can be one and selection ("auto", "device" or "host") wants it.

    small: the compressor of small tensors. Raises ConfigError if it cannot be one, and the user has asked for it.
    """
    wanted = selection == "device" or selection == "auto" and bucket.device != "cpu"
    if not wanted:
        return bucket
    for kind in bucket_classes(bucket.device):
        if issubclass(kind, RowBucket) == isinstance(bucket, RowBucket) and kind.fits(
            bucket.compressor, bucket.communicator, bucket.memory
        ):
            return kind.made_of(bucket)
    # Nothing is encoded of what is sent as it is, and no user has asked for the spec of small tensors.
    if selection == "device" and not (bucket.compressor.exact or bucket.compressor == small):
        raise ConfigError(
            f"selection='device': the bucket of {bucket.tensors[0].name!r}, {bucket.compressor} with memory {bucket.memory}, "
            f"cannot be encoded where it is: {why_not(bucket)}. Use selection='auto', or 'host'"
        )
    return bucket


def why_not(bucket: Bucket) -> str:
    """Why a bucket is none of the `bucket_classes` of its device, for an error message."""
    compressor, communicator, classes = bucket.compressor, bucket.communicator, bucket_classes(bucket.device)
    if isinstance(bucket, RowBucket):
        return (
            "of gradients that come as rows, the top-k or all of them with a value codec that has kernels can, with Triton"
        )
    if communicator.name not in {name for kind in classes for name in kind.communicators}:
        return (
            f"communicator {communicator.name!r} encodes on the host; allowed: allgather and, with Triton, sharded, tree, "
            f"hierarchical, allreduce, majority and auto"
        )
    if any(kind.can_encode(compressor, communicator) for kind in classes):
        return (
            "its memory works on the host; allowed: none, residual (without Triton in 32 bits) and, with Triton, momentum, "
            "ef21, demo, dgc, signum, 1-bit and 0/1 Adam's and, with top-k and allgather, adam and muon"
        )
    if classes == [TorchBucket]:
        return f"without Triton that runs on {bucket.device!r}, only the top-k of whole buckets can"
    return "there are no kernels for these codecs (docs/gpu.md says for which there are)"


def behind_current_stream(bucket: Bucket, pack: Callable) -> Callable:
    """pack(*out) for a bucket on a GPU, to be called in any thread: behind what backward has queued on the stream that is
    current now, because the user may run backward on another one than the default stream. What the thread does otherwise
    stays on its own current stream."""
    stream = torch.cuda.current_stream(bucket.device)
    if isinstance(bucket, TorchBucket):
        bucket.stream = stream

    def packed(*out):
        with torch.cuda.stream(stream):
            return pack(*out)

    return packed

"""Buckets of tensors that live on an accelerator: selected and summed there.

With Triton, kernels do it all (kernel_bucket.py). Without, torch operations select and sum, for top-k alone: the selected indices
and values cross to the host, where the codecs run. The bytes are those that the host kernels would make: the selection is
exact, with ties going to the lowest index.
"""

import functools
import importlib.util
import time
from collections.abc import Callable

import numpy as np
import torch

from grace_ext import ConfigError
from grace_ext._util.scratch import scratch
from grace_ext.communicators.base import Pending, wait
from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.row_buckets import RowBucket
from grace_ext.memory.packed_vector import PackedVector
from grace_ext.pipeline import container
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.decoder import unpack

MAGNITUDE = 0x7FFFFFFF


class TorchArrays:
    """Keeps a memory's state as torch tensors on one device; see grace_ext.memory.states.Arrays."""

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
    def normalized(matrix: torch.Tensor, least: float) -> torch.Tensor:
        return matrix / torch.linalg.norm(matrix).clamp(min=least)


class TorchBucket(Bucket):
    """A top-k bucket on an accelerator, exchanged by allgather."""

    communicators: tuple[str, ...] = ("allgather",)  #: Names of those that can exchange such a bucket.
    serves_hooks = False  #: Whether memories that work at positions can have such a bucket.

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
    def fits(cls, compressor, communicator, memory) -> bool:
        """Whether such a bucket can have these parts; otherwise the whole gradient is copied to the host."""
        if communicator.name not in cls.communicators or not cls.can_encode(compressor):
            return False
        return not memory.has_hooks or cls.serves_hooks and memory.works_at_positions(compressor)

    @classmethod
    def made_of(cls, bucket: Bucket) -> "TorchBucket":
        """Make such a bucket of one that fits."""
        return cls(bucket.name, bucket.tensors, bucket.compressor, bucket.communicator, bucket.memory)

    @staticmethod
    def can_encode(compressor) -> bool:
        return (
            compressor.transform is None and compressor.sparsifier.name == "topk" and compressor.sparsifier.per == "bucket"
        )

    def start(self, transport, pack, stream, on_gradient=None, on_compensated_gradient=None):
        """on_gradient gets tensors of the device, on_compensated_gradient copies on the host."""
        with torch.cuda.stream(self.stream):
            return self._start(transport, pack, stream, on_gradient, on_compensated_gradient)

    def _start(self, transport, pack, stream, on_gradient, on_compensated_gradient):
        started = time.perf_counter()
        state = self.memory.begin(self.name, self.size, self._arrays)
        dense = self._gradient if state is None else state[1]
        pack(dense)
        if on_gradient:
            on_gradient(dense, state and state[0])
        sketch = self._correct(dense, stream) if self.memory.corrects_gradient else None
        if on_compensated_gradient:
            on_compensated_gradient(dense.cpu().numpy(), state and state[0].cpu().numpy())
        pending = self._send(transport, dense, state, stream, started)
        self.memory.on_sent(self.name, pending)
        self._start_sketch(pending, transport, sketch)
        return pending

    def _send(self, transport, dense, state, stream, started):
        """Encode and send the gradient, which is in the memory's buffer for the next residual, if the memory has one.

        What has been sent is told to memories with hooks only, as int64[k] on the device.
        """
        encoded = self._encode(dense, state and state[0], stream, started)
        return Pending(
            transport.allgather(self.name, encoded.blob),
            encoded.blob.size,
            encoded.seconds,
            index_codecs=[encoded.index_codec] if encoded.index_codec else [],
            container=encoded.blob,
            support=encoded.support.long() if self.memory.has_hooks and encoded.support is not None else None,
        )

    def _correct(self, dense: torch.Tensor, stream) -> np.ndarray | None:
        """Let the memory change the gradient. Returns sketches of what it was, float32[8 * tensors], if the memory wants some."""
        raise NotImplementedError

    def _encode(self, dense, residual, stream, started):
        """Encode dense + residual (if that is not None), and leave in `dense` what the container does not carry. Both are
        float32[size]."""
        if residual is not None:
            dense += residual
        indices = select_topk(dense, self.compressor.sparsifier.count(self.size))
        encoded = self.compressor.pack(
            self.size,
            indices.to(torch.int32).cpu().numpy().view(np.uint32),
            dense[indices].cpu().numpy(),
            lambda support: dense[self._positions(support)].cpu().numpy(),
            stream,
            started=started,
        )
        if residual is not None and not encoded.non_finite:
            dense[self._positions(encoded.support)] = self._values(encoded.values - encoded.decoded)
        return encoded

    def finish(self, pending, transport, out, weight):
        joined = wait(pending)
        pending.received = joined.size
        started = time.perf_counter()
        containers = container.split(joined, transport.size, self.size)
        with torch.cuda.stream(self.stream):
            finite = self._decode_sum(containers, out, weight)
        pending.seconds["decode"] = time.perf_counter() - started
        self._receive_sketch(pending, weight)
        return finite

    def _show(self, out, scale):
        """Let the memory change the result where it lies, if it does so."""
        if self.memory.receives_anywhere:
            with torch.cuda.stream(self.stream):
                self.memory.on_received_anywhere(self.name, out, scale, self._arrays)

    def _decode_sum(self, containers, out, weight):
        """out = weight * the sum of the containers, NaN if one is not finite; returns whether all are."""
        non_finite = any(one.non_finite for one in containers)
        out.fill_(torch.nan if non_finite else 0)
        for one in containers if not non_finite else ():
            support, values = scratch("support", np.uint32, one.k), scratch("values", np.float32, one.k)
            unpack(one, support, values)
            out.index_add_(0, self._positions(support), self._values(values) * weight)  # positions are unique: exact
        return not non_finite

    def _positions(self, support: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(support.view(np.int32)).to(self.device).long()

    def _values(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


class PlacedBucket(TorchBucket):
    """A bucket on an accelerator whose communicator was made for where the gradient lies, and does all."""

    def _send(self, transport, dense, state, stream, started):
        return self.communicator.start(transport, self.name, self.compressor, dense, state, stream, self.sizes)

    def advance(self, pending, transport):
        with torch.cuda.stream(self.stream):
            super().advance(pending, transport)

    def finish(self, pending, transport, out, weight):
        with torch.cuda.stream(self.stream):
            finite = self.communicator.finish(pending, transport, out, weight)
        if finite:
            self._show(out, weight * transport.size)
        return finite


def bucket_classes(device: str) -> list[type[TorchBucket]]:
    """The classes of buckets on a device: those with kernels, where Triton is installed and can run them there."""
    if importlib.util.find_spec("triton") is None:
        return [TorchBucket]
    from .kernels import usable

    if not usable(device):
        return [TorchBucket]
    from .factor_bucket import FactorBucket
    from .kernel_bucket import KernelBucket
    from .summing_bucket import SummingBucket

    return [KernelBucket, SummingBucket, FactorBucket]


def on_its_device(bucket: Bucket, selection: str, small: Compressor | None) -> Bucket:
    """The same bucket for an accelerator, if it can be one and selection ("auto", "device" or "host") wants it.

    small: the compressor of small tensors. Raises ConfigError if it cannot be one, and the user has asked for it.
    """
    wanted = selection == "device" or selection == "auto" and bucket.device != "cpu"
    if not wanted:
        return bucket
    for kind in bucket_classes(bucket.device):
        if kind.fits(bucket.compressor, bucket.communicator, bucket.memory):
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
        return "gradients that come as rows are encoded on the host"
    if communicator.name not in {name for kind in classes for name in kind.communicators}:
        return (
            f"communicator {communicator.name!r} encodes on the host; allowed: allgather and, with Triton, sharded and tree"
        )
    if any(kind.can_encode(compressor) for kind in classes):
        return (
            "its memory works on the host; allowed: none, residual (without Triton in 32 bits) and, with Triton, momentum, "
            "ef21, demo, dgc without limits and, with top-k, adam and muon"
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


def select_topk(dense: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest magnitudes of float32[d], ascending; ties by lowest index, never an exact zero."""
    magnitude = dense.view(torch.int32) & MAGNITUDE
    bound = torch.topk(magnitude, k, sorted=False).values.min().clamp(min=1)
    above = torch.nonzero(magnitude > bound).flatten()
    ties = torch.nonzero(magnitude == bound).flatten()[: k - above.numel()]
    return torch.cat([above, ties]).sort().values

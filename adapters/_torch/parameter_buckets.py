"""Tensors of torch parameters in buckets of an exchange: what the adapters have in common, whoever starts the buckets."""

from collections.abc import Iterator

import numpy as np
import torch

from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.row_buckets import RowBucket

from .._common.options import CompressionOptions
from .device import on_its_device
from .gradients import pack
from .output_buffer import OutputBuffer
from .rows import from_rows

#: Elements of a model from which on its buckets use loans, which spare an array of that size, although they decode nothing
#: before the step ends.
LENDS_FROM = 2**25


class ParameterBuckets:
    """Builds the buckets, packs gradients into them, and receives results.

    A subclass decides when a bucket starts. It keeps `parameters` (by name), says where a gradient is (`_gradient`), and what
    the loss scale of the step is (`_loss_scale`). prefix: what the names of the exchange's collectives begin with.
    """

    parameters: dict[str, torch.nn.Parameter]
    _loss_scale: float | None
    _lends: bool  # whether buckets use loans however small the model is

    def __init__(self, exchange: Exchange, options: CompressionOptions, prefix: str):
        self.exchange, self.prefix = exchange, prefix
        self._outputs: dict[str, OutputBuffer] = {}
        self._selection = options.selection
        self._rules, self._communicator = options.make_rules(), options.make_communicator()

    def gather(self, name: str, payload: np.ndarray) -> np.ndarray:
        """uint8[m], the same m on all ranks -> uint8[ranks, m]."""
        transport = self.exchange.transport
        return transport.allgather(f"{self.prefix}.{name}", payload).wait().reshape(transport.size, -1)

    def _set_buckets(self, parts: list[list[Tensor]], tables, **limits) -> None:
        """See grace_ext.exchange.bucketing.build_buckets."""
        built = build_buckets(self.exchange, parts, tables, self._rules, self._communicator, self.prefix, **limits)
        self.exchange.set_buckets([on_its_device(bucket, self._selection, self._rules.small) for bucket in built])
        lends = self._lends or sum(bucket.size for bucket in built) >= LENDS_FROM
        self._outputs = {bucket.name: OutputBuffer(bucket, lends) for bucket in self.exchange.buckets}
        self._bucket_of = {tensor.name: bucket for bucket in self.exchange.buckets for tensor in bucket.tensors}

    def _count_missing(self) -> None:
        """A step begins: no bucket has any of its gradients."""
        self._missing = {bucket.name: len(bucket.tensors) for bucket in self.exchange.buckets}

    def _unit(self, bucket: Bucket) -> float:
        """What a bucket's gradients are divided by on their way: a memory keeps what is left of them beyond this step, and
        the next may have another loss scale."""
        return self._loss_scale if bucket.memory.stateful else 1.0

    def _gradient(self, name: str) -> torch.Tensor | None:
        raise NotImplementedError

    def _gradients_of(self, bucket: Bucket) -> list[torch.Tensor | None]:
        return [self._gradient(tensor.name) for tensor in bucket.tensors]

    def _pack(self, bucket: Bucket, gradients: list[torch.Tensor | None], factor: float, *out):
        """For Exchange.start."""
        return pack(bucket, gradients, factor, *out)

    def _results(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """When the step has ended: the bucket's results by name, as contiguous views shaped like the parameters, or sparse
        tensors."""
        output, factor = self._outputs[bucket.name], self._unit(bucket)
        names = [tensor.name for tensor in bucket.tensors]
        if isinstance(bucket, RowBucket):
            yield names[0], from_rows(output.out, self.parameters[names[0]], factor)
            return
        flat = output.borrow()
        parts = (flat.mul_(factor) if factor != 1.0 else flat).split(bucket.sizes)
        for name, part in zip(names, parts, strict=True):
            yield name, part.view(self.parameters[name].shape)


def as_tensor(name: str, tensor: torch.Tensor) -> Tensor:
    """What bucketing knows of a parameter or its gradient."""
    return Tensor(name, tensor.numel(), tensor.dim(), str(tensor.device), tuple(tensor.shape))

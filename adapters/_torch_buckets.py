"""Gradients of torch parameters in and out of the exchange's buckets, driven by autograd hooks.

Independent of the library that moves the bytes: the PyTorch adapters share it.
"""

import numpy as np
import torch

from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange import Bucket, Exchange, Tensor, make_buckets

from ._horovod_options import group_names
from ._torch_device import TorchBucket

_NOT_YET = 0xFFFFFFFF


class TorchBuckets:
    """Starts a bucket when backward has produced all its gradients; `synchronize` finishes them.

    parameters: by name, in the order of the model. See horovod_torch.DistributedOptimizer for the options.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], exchange: Exchange, rules, communicator, *, prefix,
                 bucket_bytes, groups, selection, prescale, passes, sparse_as_dense):
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.exchange = exchange
        self._rules, self._communicator = rules, communicator
        self.prefix, self._bucket_bytes, self._selection = prefix, bucket_bytes, selection
        self._prescale, self._passes, self._sparse_as_dense = prescale, passes, sparse_as_dense
        self._groups = group_names(groups, {id(p): name for name, p in self.parameters.items()})
        for name, p in self.parameters.items():
            if not p.is_floating_point():
                raise ConfigError(f"parameter {name!r} is {p.dtype}; gradients must be real floating point")
        self.order: list[str] | None = None  # of the buckets' tensors, once all ranks agreed on it
        self._produced: list[str] = []  # the order of this rank's first backward pass, or that of a checkpoint
        self._build(list(reversed(self.parameters)))

    def check_layouts(self) -> None:
        """Raises ConfigError on all ranks if they were not built alike."""
        self.exchange.check_layouts(self.gather("layout", self.exchange.layout()))

    def follow(self, order: list[str]) -> None:
        """Before the next step the ranks agree on an order of the tensors: this one if rank 0 asks for it; for an empty
        one, or one of other names, that of rank 0's next backward pass."""
        self.order = None
        self._produced = list(order) if sorted(order) == sorted(self.parameters) else []

    @property
    def wanted_order(self) -> list[str]:
        """The order in force, or what this rank will ask for; empty if it does not know yet."""
        return self._produced if self.order is None else self.order

    # Buckets

    def _build(self, order: list[str]) -> None:
        self._built = order
        tensors = [Tensor(name, p.numel(), p.dim(), str(p.device), tuple(p.shape)) for name, p in self._in_order(order)]
        choices = {tensor.name: self._rules.choose(tensor.name, tensor.size, tensor.ndim) for tensor in tensors}
        lists = make_buckets(tensors, lambda tensor: (choices[tensor.name], self.exchange.memory_of(tensor)),
                             self._bucket_bytes, self._groups)
        self.exchange.set_buckets([self._bucket(f"{self.prefix}.bucket{i}", members, choices[members[0].name])
                                   for i, members in enumerate(lists)])
        self._flat = {b.name: torch.zeros(b.size, device=_home(b)) for b in self.exchange.buckets}
        self._bucket_of = {tensor.name: b for b in self.exchange.buckets for tensor in b.tensors}
        self._reset_counts()

    def _in_order(self, order):
        return ((name, self.parameters[name]) for name in order)

    def _bucket(self, name, tensors, compressor) -> Bucket:
        bucket = self.exchange.bucket(name, tensors, compressor, self._communicator)
        on_device = self._selection == "device" or self._selection == "auto" and bucket.device != "cpu"
        if on_device and TorchBucket.fits(compressor, bucket.communicator, bucket.memory):
            return TorchBucket(name, tensors, compressor, bucket.communicator, bucket.memory)
        return bucket

    def gather(self, name: str, payload: np.ndarray) -> np.ndarray:
        """uint8[m], the same m on all ranks -> uint8[ranks, m]."""
        joined = self.exchange.transport.allgather(f"{self.prefix}.{name}", payload).wait()
        return joined.reshape(self.exchange.transport.size, -1)

    def _agree(self) -> None:
        """Before the first step: buckets in the order in which rank 0 produced the gradients, or its checkpoint says."""
        names = list(self.parameters)
        seen = self._produced + [name for name in reversed(names) if name not in self._produced]
        order = np.array([names.index(name) for name in seen], "<u4")
        if not self._produced:
            order[:] = _NOT_YET  # no backward pass yet
        chosen = self.gather("order", order.view(np.uint8))[0].copy().view("<u4")
        if chosen.size and chosen[0] != _NOT_YET:
            self.order = [names[i] for i in chosen]
            if self.order != self._built:
                self._build(self.order)

    # The step

    def _reset_counts(self) -> None:
        self._left = dict.fromkeys(self.parameters, self._passes)
        self._missing = {b.name: len(b.tensors) for b in self.exchange.buckets}

    def set_passes(self, passes: int) -> None:
        if passes < 1 or self.under_way():
            raise ConfigError("backward_passes_per_step must be 1 or more, and cannot change between backward() and step()")
        self._passes = passes
        self._reset_counts()

    def under_way(self) -> bool:
        """Whether a bucket's gradients have been handed over and not yet been synchronized."""
        return not all(self._missing.values())

    def produced(self, name: str) -> None:
        """The parameter has its gradient of one backward pass. Starts the bucket that it completes, except in a first step:
        there the ranks have yet to agree on the buckets."""
        p = self.parameters[name]
        if self._left[name] == 0:
            raise ExchangeError(f"the gradient of {name!r} was computed more than backward_passes_per_step="
                                f"{self._passes} times before step(); increase backward_passes_per_step")
        if p.grad.is_sparse and not self._sparse_as_dense:
            raise ConfigError(f"the gradient of {name!r} is sparse; pass sparse_as_dense=True")
        self._left[name] -= 1
        if self._left[name] == 0:
            if self.order is None and name not in self._produced:
                self._produced.append(name)
            bucket = self._bucket_of[name]
            self._missing[bucket.name] -= 1
            if self._missing[bucket.name] == 0 and self.order is not None:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        self.exchange.start(bucket, lambda out: self._pack(bucket, out))

    def _pack(self, bucket: Bucket, out) -> None:
        """Copy the bucket's gradients, in its order, to out (float32[size], numpy or torch). A missing one is zero."""
        flat = torch.from_numpy(out) if isinstance(out, np.ndarray) else out
        at = 0
        for tensor in bucket.tensors:
            part = flat[at:at + tensor.size]
            gradient = self.parameters[tensor.name].grad
            if gradient is None:
                part.zero_()
            else:
                gradient = gradient.detach()
                part.copy_((gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1))
            at += tensor.size
        if self._prescale != 1.0:
            flat.mul_(self._prescale)

    def synchronize(self) -> None:
        """Finish all buckets; those with a parameter that got no gradient on this rank are started first."""
        try:
            if self.order is None:
                self._agree()
            for bucket in self.exchange.buckets:
                if not self.exchange.is_started(bucket):
                    self._start(bucket)
            self.exchange.advance()
            for bucket in self.exchange.buckets:
                flat = self._flat[bucket.name]
                self.exchange.finish(bucket, flat if isinstance(bucket, TorchBucket) else flat.numpy())
                self._unpack(bucket, flat)
        except BaseException:
            self.exchange.abort()
            raise
        finally:
            self._reset_counts()
        self.exchange.end_step()

    def abort(self) -> None:
        """Forget a step that cannot be finished."""
        self.exchange.abort()
        self._reset_counts()

    def _unpack(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Make the gradients views of the result, or copies where dtype or device differ."""
        at = 0
        for tensor in bucket.tensors:
            p = self.parameters[tensor.name]
            p.grad = flat[at:at + tensor.size].view(p.shape).to(dtype=p.dtype, device=p.device)
            at += tensor.size


def _home(bucket: Bucket) -> str:
    """Where the bucket's result is written."""
    return bucket.device if isinstance(bucket, TorchBucket) else "cpu"

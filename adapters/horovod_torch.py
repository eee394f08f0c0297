"""Horovod's distributed optimizer for PyTorch, with compressed gradients. No patch to Horovod.

    optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

import itertools
import warnings
from contextlib import contextmanager

import horovod.torch as hvd
import numpy as np
import torch

from grace_ext import ConfigError, ExchangeError, checkpoint
from grace_ext.capture import Capture
from grace_ext.communicators import Transport
from grace_ext.exchange import Exchange
from grace_ext.policy import DEFAULT_SPEC, Rules
from grace_ext.spec import parse_stage

from ._horovod_exit import guard_exit
from ._horovod_options import check_reduction, understand_compression, weight_of
from ._torch_buckets import TorchBuckets
from ._torch_connection import Connection
from ._torch_state import to_numpy, to_torch

_instances = itertools.count()


class HorovodTransport(Transport):
    """The collectives of grace_ext over Horovod's PyTorch operations, in one process set."""

    def __init__(self, process_set):
        self._process_set = process_set
        self.rank, self.size = process_set.rank(), process_set.size()

    def allgather(self, name, payload):
        return _Handle(hvd.allgather_async(torch.from_numpy(payload), name=name, process_set=self._process_set))

    def allreduce(self, name, array):
        return _Handle(hvd.allreduce_async_(torch.from_numpy(array), op=hvd.Sum, name=name,
                                            process_set=self._process_set))

    def send(self, name: str, payload: np.ndarray, to: int) -> list[np.ndarray]:
        """A collective that returns all ranks' payloads, uint8[m], on rank `to` only, an empty list elsewhere."""
        splits = torch.zeros(self.size, dtype=torch.int32)
        splits[to] = payload.size
        joined, lengths = hvd.alltoall(torch.from_numpy(payload.copy()), splits, name=name, process_set=self._process_set)
        return np.split(joined.numpy(), np.cumsum(lengths.numpy())[:-1]) if self.rank == to else []


class _Handle:
    def __init__(self, handle):
        self._handle = handle

    def wait(self) -> np.ndarray:
        return hvd.synchronize(self._handle).numpy()


def DistributedOptimizer(optimizer, named_parameters=None, compression=DEFAULT_SPEC, backward_passes_per_step=1,
                         op=hvd.Average, gradient_predivide_factor=1.0, num_groups=0, groups=None,
                         sparse_as_dense=False, process_set=hvd.global_process_set, *, memory="residual",
                         communicator="allgather", rules=None, bucket_bytes=25 * 2**20, selection="auto", seed=0,
                         capture=None, schedule=None, on_resize=None):
    """Wrap a torch.optim.Optimizer so that gradients are compressed, exchanged and averaged before each step.

    A drop-in for hvd.DistributedOptimizer: the arguments up to process_set are Horovod's, in its order. The result is
    an instance of the given optimizer's class that shares its state and param_groups.

    compression: a spec ("topk:0.01/rice/qsgd:7", see `python -m grace_ext codecs`), its dict form, a Compressor, or
        Horovod's hvd.Compression.none and .fp16, which mean dense gradients by allreduce without a memory.
    memory: "residual" (error feedback), "none", "ef21", "dgc" or another (`python -m grace_ext codecs`), or specs by name
        pattern or size, as in rules: {"*embedding*": "none", "*": "residual:decay=0.9"}.
    communicator: "allgather", or "allreduce" for dense raw and fp16 specs, and for randomk.
        Dense float32 always goes by allreduce: the result is the same and the bytes are fewer. So do low-rank factors
        ("powersgd:4"), which only sums can carry.
    rules: {"*.bias": "dense/raw", "<=4096": "dense/raw", ...}: specs by name pattern or size, the first that fits. Without
        one, tensors of at most 1024 elements or fewer than two dimensions ride in a dense float32 bucket.
    groups: lists of parameters that share a bucket, or a number of equal groups; overrides bucket_bytes.
    bucket_bytes: float32 bytes after which a bucket is closed. Buckets follow the order in which the first backward pass
        on rank 0 produced the gradients; from the second step on, each is encoded and sent while backward goes on.
    selection: "host", "device" (top-k with torch operations where the gradients are, only the selected values come to
        the host) or "auto": device for tensors on an accelerator. The bytes are the same.
    seed: of the stochastic codecs; the same on all ranks.
    capture: a folder in which rank 0 saves its own gradients of steps 1, 10, 100, 1000 and 10000, before and after error
        feedback, for `python -m grace_ext bench --input FILE`; or a grace_ext.capture.Capture that names other steps.
        A full disk and the like end the capture with a warning, never the training. With one rank nothing is compressed,
        so there is nothing to capture either: a warning says so.
    schedule: options of the spec that change from step to step: {"density": "warmup:steps=2000"}, or a function of the step
        that gives the same on all ranks; see grace_ext.policy.Schedules.
    on_resize: what becomes of the memories when a checkpoint of another number of ranks is loaded, or elastic Horovod adds
        or removes some. "reset": they start from zero. "redistribute": the sum of residuals is preserved, each rank takes
        an equal part. None: redistribute, or reset with a warning where a checkpoint has not all of them.

    state_dict() has this rank's memory under "grace_ext", and those of all ranks after consolidate_state_dict().

    Raises ConfigError for what cannot be honoured: op=Adasum, complex parameters, sparse gradients without
    sparse_as_dense, specs that differ between ranks.
    """
    check_reduction(hvd, op, gradient_predivide_factor)
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}; allowed: 1 and more")
    if not isinstance(capture, Capture | None):
        capture = Capture(capture)
    if num_groups:
        groups = num_groups
    if selection not in ("auto", "host", "device"):
        raise ConfigError(f"selection={selection!r}; allowed: auto, host, device")
    compression, memory, communicator = understand_compression(hvd, compression, memory, communicator)
    parameters = _named(optimizer, named_parameters)
    plain = type(optimizer)
    # A leaf class with Horovod's module name: hvd.broadcast_optimizer_state knows by it that it must not call our step.
    methods = {name: method for name, method in vars(_Methods).items() if not name.startswith("__")}
    wrapped_class = type(plain.__name__, (plain,), {**methods, "__module__": hvd.DistributedOptimizer.__module__})
    wrapped = wrapped_class.__new__(wrapped_class)
    # A learning-rate scheduler made before leaves a bound `step` on the instance; it would bypass ours.
    wrapped.__dict__.update((key, value) for key, value in vars(optimizer).items() if key != "step")
    wrapped._plain = plain
    wrapped._should_synchronize, wrapped._synchronized = True, False
    wrapped._passes = backward_passes_per_step
    prefix = f"grace_ext.{next(_instances)}"

    def build() -> TorchBuckets:
        guard_exit()
        weight = weight_of(hvd, op, gradient_predivide_factor, process_set.size())
        exchange = Exchange(HorovodTransport(process_set), memory, weight, seed, capture, schedule=schedule)
        return TorchBuckets(
            parameters, exchange, Rules(compression, rules, seed), parse_stage("communicator", communicator), prefix=prefix,
            bucket_bytes=bucket_bytes, groups=groups, selection=selection, prescale=1.0 / gradient_predivide_factor,
            passes=wrapped._passes, sparse_as_dense=sparse_as_dense)

    wrapped._connection = Connection(
        parameters, lambda: (process_set.rank(), process_set.size()) if process_set.included() else None, build,
        on_resize)
    if wrapped._grace is not None:
        wrapped._grace.check_layouts()
    elif capture:
        warnings.warn("capture: there is one rank, so gradients are neither compressed nor captured", stacklevel=2)
    return wrapped


def _named(optimizer, named_parameters) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters by unique name, in the order of the model."""
    own = [(f"group{i}.{j}", p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    named = own if named_parameters is None else list(named_parameters)
    if any(not (isinstance(item, tuple) and len(item) == 2) for item in named):
        raise ConfigError("named_parameters should be (name, parameter) tuples, usually model.named_parameters()")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"named_parameters: names must be unique; found twice: {', '.join(twice)}")
    optimized = {id(p) for _, p in own}
    unnamed = len(optimized - {id(p) for _, p in named})
    if unnamed:
        raise ConfigError(f"named_parameters lacks {unnamed} of the optimizer's parameters")
    return {name: p for name, p in named if id(p) in optimized}


class _Methods:
    """What the wrapped optimizer does differently; its `_plain` is the class that was wrapped."""

    @property
    def _grace(self) -> TorchBuckets | None:
        """The buckets for the ranks there are now; None without other ranks."""
        return self._connection.buckets

    def synchronize(self):
        """Finish the exchange: afterwards every gradient is the average (or sum) over ranks, the same on all."""
        self._connection.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self):
        """Inside, step() does not synchronize: for gradient clipping or unscaling after an explicit synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure=None):
        """Synchronize (unless skipped), then the wrapped optimizer's step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn("optimizer.step() after optimizer.synchronize() exchanges the gradients again; wrap it in "
                              "optimizer.skip_synchronize()", stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return self._plain.step(self, closure)

    def zero_grad(self, *args, **kwargs):
        """As the wrapped optimizer's; not between backward() and step() or synchronize()."""
        buckets = self._grace
        if buckets is not None and buckets.under_way():
            raise ExchangeError("optimizer.zero_grad() between backward() and step() or synchronize() would race with the "
                                "exchange of the gradients")
        return self._plain.zero_grad(self, *args, **kwargs)

    def state_dict(self):
        """The wrapped optimizer's, and under "grace_ext" this rank's memory, or those of all ranks after
        consolidate_state_dict(). No collective."""
        return {**self._plain.state_dict(self), checkpoint.KEY: to_torch(self._connection.save())}

    def load_state_dict(self, state_dict):
        """Of a wrapped optimizer or a plain one. No collective: call it on all ranks, or, before the first step, on rank 0
        and then hvd.broadcast_optimizer_state. What was done with the memories is said in the log "grace_ext".

        Raises ConfigError if the memories do not fit, or for on_resize="redistribute" if some are missing.
        """
        saved = state_dict.get(checkpoint.KEY)
        self._connection.load(None if saved is None else to_numpy(saved))
        self._plain.load_state_dict(self, {key: value for key, value in state_dict.items() if key != checkpoint.KEY})

    def consolidate_state_dict(self, to=0):
        """A collective: until the next step, state_dict() on rank `to` holds the memories of all ranks."""
        self._connection.consolidate(to)

    def set_backward_passes_per_step(self, passes):
        """How many backward passes are accumulated before gradients are exchanged, from the next step on."""
        buckets = self._grace
        if buckets is not None:
            buckets.set_passes(passes)
        self._passes = passes

    def compression_stats(self):
        """Bytes, ratio and seconds per stage, in total and of the last step: see grace_ext.exchange.Exchange.stats."""
        buckets = self._grace
        return {"steps": 0} if buckets is None else buckets.exchange.stats()

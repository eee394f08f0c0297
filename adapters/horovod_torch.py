"""Horovod's distributed optimizer for PyTorch, with compressed gradients. No patch to Horovod.

optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

import concurrent.futures
import functools
import os
import time
import warnings
import weakref
from contextlib import contextmanager

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.mpi_ops import _allgather_async, _alltoall_async
from torch.amp.grad_scaler import OptState

from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange import checkpoint
from grace_ext.exchange.engine import Exchange
from grace_ext.observe import parse_observers, warn_of_one_rank
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import DEFAULT_SPEC, Rules
from grace_ext.transport import CollectiveHandle, Transport

from ._horovod.exits import guard_exit
from ._horovod.lengths import Lengths, as_splits, from_itself, padded, to_itself, without_padding
from ._horovod.options import check_reduction, prefix_of, understand_compression, weight_of
from ._torch.buckets import JOIN_AND_CLOSURE, TorchBuckets
from ._torch.elastic import CompressedOptimizer, register
from ._torch.gradients import check_options, named
from ._torch.saved_state import to_numpy, to_torch
from ._torch.session import MembershipSession

_AWAKE = 5e-3  # seconds of waiting for a collective before the first nap
_NAP, _SHORTEST, _LONGEST = 0.1, 5e-5, 1e-3  # the next nap's share of the wait so far, and its seconds
_LOOK, _CROWD = 1.0, 0.2  # seconds between two looks at it, and the share of its time that a thread waits for a core
register()


class HorovodTransport(Transport):
    """The collectives of grace_ext over Horovod's PyTorch operations, in one process set."""

    def __init__(self, process_set):
        self._process_set = process_set
        self.rank, self.size, self.world_rank = process_set.rank(), process_set.size(), hvd.rank()
        self._lengths = Lengths()

    def between_steps(self):
        return self

    def allgather(self, name, payload):
        room = padded(payload, self._lengths.of(name, payload.size))
        sent = torch.from_numpy(room)
        received = sent.new()
        held = _hold(sent, received)
        return _collective(
            _allgather_async(sent, received, name, self._process_set),
            held,
            lambda received: without_padding(name, received.numpy()),
            room.size - payload.size,
        )

    def allreduce(self, name, array):
        tensor = torch.from_numpy(array)
        held = _hold(tensor)
        return _collective(hvd.allreduce_async_(tensor, op=hvd.Sum, name=name, process_set=self._process_set), held)

    def sum_tensor(self, name: str, tensor: torch.Tensor, prescale: float, postscale: float):
        """A tensor, on any device, as Horovod reduces it: in place -> handle."""
        held = _hold(tensor)
        return _collective(
            hvd.allreduce_async_(
                tensor,
                op=hvd.Sum,
                name=name,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=self._process_set,
            ),
            held,
            lambda _: None,
        )

    def alltoall(self, name, payload, splits):
        length = self._lengths.of(name, payload.size)
        room, parts = to_itself(payload, splits, self.rank, length)
        sent, sizes = torch.from_numpy(room), torch.from_numpy(as_splits(name, parts))
        received, received_sizes = sent.new(), sizes.new()
        held = _hold(sent, sizes, received, received_sizes)
        return _collective(
            _alltoall_async(sent, sizes, received, received_sizes, name, self._process_set),
            held,
            lambda got: from_itself(got[0].numpy(), got[1].tolist(), self.rank, length - payload.size),
        )

    def send(self, name: str, payload: np.ndarray, to: int) -> list[np.ndarray]:
        """A collective that returns all ranks' payloads, uint8[m], on rank `to` only, an empty list elsewhere."""
        splits = torch.zeros(self.size, dtype=torch.int32)
        splits[to] = payload.size
        joined, lengths = hvd.alltoall(torch.from_numpy(payload.copy()), splits, name=name, process_set=self._process_set)
        return np.split(joined.numpy(), np.cumsum(lengths.numpy())[:-1]) if self.rank == to else []


class _Core:
    """Whether others want this rank's core: other ranks, other programs, other containers, which may be hosts of this job.
    Told by how long Linux lets the rank's main thread wait for a core, in the last second or so."""

    def __init__(self):
        self._crowded, self._looked, self._before = hvd.local_size() > os.cpu_count(), time.monotonic(), self._now()

    def is_crowded(self) -> bool:
        if (now := time.monotonic()) - self._looked > _LOOK:
            after, self._looked = self._now(), now
            ran, waited = after[0] - self._before[0], after[1] - self._before[1]
            self._before, self._crowded = after, hvd.local_size() > os.cpu_count() or waited > _CROWD * (ran + waited)
        return self._crowded

    @staticmethod
    def _now() -> tuple[int, int]:
        """Nanoseconds that the main thread ran so far, and that it could have run if there had been a core."""
        try:
            with open("/proc/self/schedstat", encoding="ascii") as file:
                ran, waited, _ = file.read().split()
        except OSError:  # a kernel without it
            return 0, 0
        return int(ran), int(waited)


@functools.cache
def _core() -> _Core:
    return _Core()


def _hold(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Keeps a reference of C++ to each tensor, as long as what it returns lives. To be called before Horovod gets them.

    In torch 2.13, who lets go of a tensor needs the interpreter lock if Python's is then the only reference. At a shutdown,
    Horovod 0.28.1 lets go of all that is under way with its table of process sets locked, and who starts a collective
    waits for that table with the interpreter lock: without this, the two wait for each other for ever.
    """
    holders = [tensor.detach() for tensor in tensors]
    for holder, tensor in zip(holders, tensors, strict=True):
        holder.grad = tensor
    return holders


def _collective(handle: int, held: list, payload=torch.Tensor.numpy, padding=0) -> CollectiveHandle:
    """handle: Horovod's. held: see _hold. payload: what `wait` makes of the collective's results."""
    return CollectiveHandle(functools.partial(_wait, handle, held, payload), functools.partial(hvd.poll, handle), padding)


def _wait(handle: int, _held: list, payload):
    # synchronize() alone waits in a loop that takes the core from the codecs and from other ranks: with Gloo, 4 ranks on
    # 2 cores, a step of 113 ms took 29 when this was added. Where each rank has a core, a nap makes the next step's
    # computation slower (41 ms a step against 35), so naps are for long waits there.
    awake = 0 if _core().is_crowded() else _AWAKE
    began = time.perf_counter()
    while not hvd.poll(handle):
        waited = time.perf_counter() - began
        if waited < awake:
            os.sched_yield()
        else:
            time.sleep(min(max(_NAP * waited, _SHORTEST), _LONGEST))
    return payload(hvd.synchronize(handle))


def DistributedOptimizer(
    optimizer,
    named_parameters=None,
    compression=DEFAULT_SPEC,
    backward_passes_per_step=1,
    op=hvd.Average,
    gradient_predivide_factor=1.0,
    num_groups=0,
    groups=None,
    sparse_as_dense=False,
    process_set=hvd.global_process_set,
    *,
    memory="residual",
    communicator="allgather",
    rules=None,
    bucket_bytes=25 * 2**20,
    selection="auto",
    seed=0,
    capture=None,
    schedule=None,
    on_resize=None,
    grad_scaler=None,
    observe=None,
    _plain=None,
    _buckets=None,
):
    """Wrap a torch.optim.Optimizer so that gradients are compressed, exchanged and averaged before each step.

    A drop-in for hvd.DistributedOptimizer: the arguments up to process_set are Horovod's, in its order. The result is
    an instance of the given optimizer's class that shares its state and param_groups. Wrapping parameters once more
    detaches the optimizer that exchanged them before.

    compression: a spec ("topk:0.01/rice/qsgd:7", see `python -m grace_ext codecs`), its dict form, a Compressor, or
        Horovod's hvd.Compression.none and .fp16, which mean dense gradients by allreduce without a memory.
    memory: "residual" (error feedback), "none", "ef21", "dgc" or another (`python -m grace_ext codecs`), or specs by name
        pattern or size, as in rules: {"*embedding*": "none", "*": "residual:decay=0.9"}.
    communicator: "allgather"; "sharded" or "tree" for many ranks or slow links, "hierarchical" for several ranks a host (see
        docs/training.md); "allreduce" for dense raw and fp16 specs, and for randomk; or "auto", which measures these in the
        first steps, float16 and float32 without compression as well, and takes the fastest for each bucket.
        Dense float32 always goes by allreduce: the result is the same and the bytes are fewer. So do low-rank factors
        ("powersgd:4"), which only sums can carry.
    rules: {"*.bias": "dense/raw", "<=4096": "dense/raw", ...}: specs by name pattern or size, the first that fits. Without
        one, tensors of at most 1024 elements or fewer than two dimensions ride in a dense float32 bucket.
    sparse_as_dense: sparse gradients, as nn.Embedding(sparse=True) makes them, are made dense. Otherwise they are exchanged
        as rows and stay sparse, with each row once; where no rule says anything else, as "dense/lloyd:0.1" by default.
        Which parameters have such gradients is seen in the first step in which they have gradients.
    groups: lists of parameters that share a bucket, or a number of equal groups; overrides bucket_bytes.
    bucket_bytes: float32 bytes after which a bucket is closed. Buckets follow the order in which the first backward pass
        on rank 0 produced the gradients; from the second step on, each is encoded and sent while backward goes on.
    selection: "host", "device" (top-k with torch operations where the gradients are, only the selected values come to
        the host) or "auto": device for tensors on an accelerator. The bytes are the same.
    seed: of the stochastic codecs; the same on all ranks.
    capture: a folder in which rank 0 saves its own gradients of steps 1, 10, 100, 1000 and 10000, before and after error
        feedback, for `python -m grace_ext bench --input FILE`; or a grace_ext.observe.Capture that names other steps.
        A full disk and the like end the capture with a warning, never the training. With one rank nothing is compressed,
        so there is nothing to capture either: a warning says so.
    schedule: options of the spec that change from step to step: {"density": "warmup:steps=2000"}, or a function of the step
        that gives the same on all ranks; see grace_ext.policy.Schedules. {"density": "kimad:0.2"}: what fits into steps of
        0.2 s, on each rank by what its link gives; "kimad+:0.2": with a density for each bucket.
    observe: where rank 0 writes bytes, ratio, seconds and residual norms of every tenth step: a path in .jsonl or .csv, a
        folder for TensorBoard, an object of grace_ext.observe (which knows other steps, and a Timeline), or a list of these.
    on_resize: what becomes of the memories when a checkpoint of another number of ranks is loaded, or elastic Horovod adds
        or removes some. "reset": they start from zero. "redistribute": the sum of residuals is preserved, each rank takes
        an equal part. None: redistribute, or reset with a warning where a checkpoint has not all of them.
    grad_scaler: the torch.amp.GradScaler that scales the loss, so that the memory keeps unscaled units. Call synchronize()
        before scaler.unscale_(optimizer), and scaler.step(optimizer) in skip_synchronize(); or scaler.step(optimizer) alone,
        which does all of it.

    state_dict() has this rank's memory under "grace_ext", and those of all ranks after consolidate_state_dict().

    Raises ConfigError for what cannot be honoured: op=Adasum, complex parameters, gradients that are sparse in another way
    than by rows without sparse_as_dense, an optimizer that Horovod has wrapped, specs that differ between ranks.
    """
    # _plain, _buckets: the class to derive from and what builds the buckets, for optimizers of our own.
    check_reduction(hvd, op, gradient_predivide_factor)
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}; allowed: 1 and more")
    check_options(selection, grad_scaler)
    capture, observe = parse_observers(capture, observe)
    if num_groups:
        groups = num_groups
    compression, memory, communicator = understand_compression(hvd, compression, memory, communicator)
    if hasattr(optimizer, "_allreduce_grad_async"):
        raise ConfigError("hvd.DistributedOptimizer has wrapped this optimizer: wrap the plain one instead")
    named_parameters = named_parameters if named_parameters is None else list(named_parameters)
    parameters = _named(optimizer, named_parameters)
    plain = _plain or getattr(optimizer, "_plain", type(optimizer))
    # A leaf class with Horovod's module name: hvd.broadcast_optimizer_state knows by it that it must not call our step.
    methods = {name: method for name, method in vars(_Methods).items() if not name.startswith("__")}
    methods["__module__"] = hvd.DistributedOptimizer.__module__
    wrapped_class = type(plain.__name__, (plain, CompressedOptimizer), methods)
    wrapped = wrapped_class.__new__(wrapped_class)
    # A learning-rate scheduler made before leaves a bound `step` on the instance; it would bypass ours.
    wrapped.__dict__.update((key, value) for key, value in vars(optimizer).items() if key != "step")
    wrapped._plain, wrapped._named_parameters = plain, named_parameters
    wrapped._before = weakref.WeakSet([optimizer, *getattr(optimizer, "_before", ())])
    wrapped._should_synchronize, wrapped._synchronized, wrapped._asked_by_scaler = True, False, False
    wrapped._grad_scaler, wrapped._process_set = grad_scaler, process_set
    wrapped._passes = backward_passes_per_step
    prefix = prefix_of(process_set)

    def build(parameters) -> TorchBuckets:
        guard_exit(hvd)
        weight = weight_of(hvd, op, gradient_predivide_factor, process_set.size())
        exchange = Exchange(
            HorovodTransport(process_set), memory, weight, seed, capture, schedule=schedule, joinable=True, observe=observe
        )
        make = functools.partial(_buckets, wrapped) if _buckets else TorchBuckets
        return make(
            parameters,
            exchange,
            Rules(compression, rules, seed),
            parse_stage("communicator", communicator),
            prefix=prefix,
            bucket_bytes=bucket_bytes,
            groups=groups,
            selection=selection,
            prescale=1.0 / gradient_predivide_factor,
            passes=wrapped._passes,
            sparse_as_dense=sparse_as_dense,
            scale=grad_scaler.get_scale if grad_scaler else lambda: 1.0,
        )

    wrapped._session = MembershipSession(
        parameters, lambda: (process_set.rank(), process_set.size()) if process_set.included() else None, build, on_resize
    )
    if wrapped._grace is not None:
        _check_momentum(optimizer, wrapped._grace)
        # A worker that elastic Horovod adds must start no collective here: the others are already somewhere else.
        if os.environ.get("HOROVOD_ELASTIC") != "1":
            wrapped._grace.check_config_digests()
    else:
        warn_of_one_rank(capture, observe, stacklevel=2)
    return wrapped


def _named(optimizer, named_parameters) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters by unique name, in the order of the model."""
    own = [(f"group{i}.{j}", p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    by_name = named(own if named_parameters is None else named_parameters)
    optimized = {id(p) for _, p in own}
    unnamed = len(optimized - {id(p) for p in by_name.values()})
    if unnamed:
        raise ConfigError(f"named_parameters lacks {unnamed} of the optimizer's parameters")
    return {name: p for name, p in by_name.items() if id(p) in optimized}


def _check_momentum(optimizer, buckets: TorchBuckets) -> None:
    """Raises ConfigError where a memory and the optimizer would both apply a momentum."""
    corrected = {
        id(buckets.parameters[tensor.name])
        for bucket in buckets.exchange.buckets
        if bucket.memory.applies_momentum
        for tensor in bucket.tensors
    }
    for group in optimizer.param_groups:
        momentum = group.get("momentum") or group.get("betas", (0,))[0]
        if momentum and any(id(p) in corrected for p in group["params"]):
            raise ConfigError(
                f"memory 'dgc' has the momentum, and the optimizer's, {momentum}, would be applied once more: "
                f"use for example torch.optim.SGD with momentum=0 and memory 'dgc:momentum={momentum}'"
            )


def _check_scaler(optimizer) -> None:
    """When GradScaler.step is about to look at gradients that are not exchanged yet."""
    scaler = optimizer._grad_scaler
    if scaler is not None:
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
            raise ExchangeError(
                "scaler.unscale_(optimizer) changed gradients that were on their way: call optimizer.synchronize() before it"
            )
    elif optimizer._grace is not None and any(b.memory.stateful for b in optimizer._grace.exchange.buckets):
        warnings.warn(
            "this optimizer was not told of its GradScaler: its memory keeps scaled units, which are wrong for a "
            "step whenever the loss scale changes; pass grad_scaler=scaler to DistributedOptimizer",
            stacklevel=4,
        )


class _Methods:
    """What the wrapped optimizer does differently; its `_plain` is the class that was wrapped."""

    @property
    def _grace(self) -> TorchBuckets | None:
        """The buckets for the ranks there are now; None without other ranks."""
        return self._session.buckets

    def synchronize(self):
        """Finish the exchange: afterwards every gradient is the average (or sum) over ranks, the same on all."""
        self._session.synchronize()
        self._synchronized, self._asked_by_scaler = True, False

    def join(self, *others):
        """Instead of hvd.join(), for ranks that have fewer batches than others: take part in their steps with nothing, until
        all ranks have joined. Averages are still over all ranks. Returns the rank that joined last; it has made all steps:
        go on with hvd.broadcast_parameters and hvd.broadcast_optimizer_state from it.

        others: the loop's other wrapped optimizers, if there are several; they can only be joined together.

        This rank's memory stays as it is meanwhile. Until all have joined the other ranks may use no other collective of
        Horovod, and must not freeze or unfreeze parameters. Raises ExchangeError between backward() and step(), and
        ConfigError after step(closure), which exchanges losses as well.
        """
        if any(optimizer._grace is not None and optimizer._grace.has_losses for optimizer in (self, *others)):
            raise ConfigError(JOIN_AND_CLOSURE)
        sessions = [optimizer._session for optimizer in (self, *others)]
        with concurrent.futures.ThreadPoolExecutor(len(sessions)) as threads:  # whatever the order in which they step
            last, *_ = threads.map(MembershipSession.join, sessions)
        return self._process_set.ranks[last] if self._process_set.included() else hvd.rank()

    @contextmanager
    def skip_synchronize(self):
        """Inside, step() does not synchronize: for gradient clipping or unscaling after an explicit synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure=None):
        """Synchronize (unless skipped), then the wrapped optimizer's step.

        closure: computes the gradients, so that each call of it synchronizes, unless it has done so itself, for example to
        clip gradients then. Where it returns numbers, the optimizer gets their average over ranks (their sum with
        op=hvd.Sum), as the gradients are: one that looks at the loss, like LBFGS, does the same on all ranks. A step is then
        counted for each call.

        Raises ExchangeError if gradients are already on their way, or if in skip_synchronize() the closure has not
        synchronized; and ConfigError if it returns a number on some ranks only.
        """
        if closure is not None:
            return self._step_with(closure)
        if self._should_synchronize and not (self._asked_by_scaler and self._is_synchronized()):
            if self._is_synchronized():
                warnings.warn(
                    "optimizer.step() after optimizer.synchronize() exchanges the gradients again; wrap it in "
                    "optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        return self._inner_step()

    def _step_with(self, closure):
        buckets = self._grace
        if buckets is not None and buckets.fresh:
            raise ExchangeError(
                "step(closure) exchanges the gradients that the closure computes, and others are on their "
                "way: call backward() in the closure only, or optimizer.synchronize() before the step"
            )

        def synchronized():
            self._synchronized = False
            loss = closure()
            if not self._is_synchronized():
                if not self._should_synchronize:
                    raise ExchangeError(
                        "the closure of a step in skip_synchronize() has to call optimizer.synchronize() after backward()"
                    )
                self.synchronize()
            return loss if self._grace is None else self._grace.reduce_loss(loss)

        if buckets is not None:
            buckets.has_losses = True
        return self._inner_step(synchronized)

    def _inner_step(self, closure=None):
        self._synchronized = self._asked_by_scaler = False
        for optimizer in self._before:
            optimizer._opt_called = True  # a learning-rate scheduler made before wrapping looks at it
        loss = self._plain.step(self, closure)
        self._synchronized = False
        return loss

    def _is_synchronized(self):
        buckets = self._grace
        return self._synchronized and not (buckets is not None and buckets.fresh)

    @property
    def _step_supports_amp_scaling(self):
        """GradScaler.step asks for this first of all: the moment to finish the exchange, so that it unscales gradients that
        are the same on all ranks and skips the step on all or on none."""
        if self._should_synchronize:
            if not self._is_synchronized():
                _check_scaler(self)
                self.synchronize()
            self._asked_by_scaler = True
        return vars(self).get("_step_supports_amp_scaling", False)  # what the wrapped optimizer has to say

    def zero_grad(self, *args, **kwargs):
        """As the wrapped optimizer's; not between backward() and step() or synchronize()."""
        buckets = self._grace
        if buckets is not None and buckets.under_way():
            raise ExchangeError(
                "optimizer.zero_grad() between backward() and step() or synchronize() would race with the "
                "exchange of the gradients"
            )
        self._synchronized = False
        return self._plain.zero_grad(self, *args, **kwargs)

    def add_param_group(self, param_group):
        """As the wrapped optimizer's; on all ranks in the same step. Raises ConfigError for parameters that were not among
        named_parameters, if these were given."""
        self._plain.add_param_group(self, param_group)
        try:
            parameters = _named(self, self._named_parameters)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._session.add(parameters)

    def state_dict(self):
        """The wrapped optimizer's, and under "grace_ext" this rank's memory, or those of all ranks after
        consolidate_state_dict(). No collective."""
        return {**self._plain.state_dict(self), checkpoint.KEY: to_torch(self._session.save())}

    def load_state_dict(self, state_dict):
        """Of a wrapped optimizer or a plain one. No collective: call it on all ranks, or, before the first step, on rank 0
        and then hvd.broadcast_optimizer_state. What was done with the memories is said in the log "grace_ext".

        Raises ConfigError if the memories do not fit, or for on_resize="redistribute" if some are missing.
        """
        saved = state_dict.get(checkpoint.KEY)
        # The optimizer first: what its memory is may depend on it, as that of 1-bit Adam does.
        self._load_plain({key: value for key, value in state_dict.items() if key != checkpoint.KEY})
        self._session.load(None if saved is None else to_numpy(saved))

    def consolidate_state_dict(self, to=0):
        """A collective: until the next step, state_dict() on rank `to` holds the memories of all ranks."""
        self._session.consolidate(to)

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

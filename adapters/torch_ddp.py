"""A communication hook for torch's DistributedDataParallel that compresses gradients, over Gloo and NCCL.

model = torch.nn.parallel.DistributedDataParallel(module)
model.register_comm_hook(CompressionState(module.named_parameters()), comm_hook)
"""

import concurrent.futures
import datetime
import functools
import glob
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grace_ext import ConfigError
from grace_ext.exchange import checkpoint
from grace_ext.exchange.stalls import watch_ranks
from grace_ext.pipeline.compressor import Compressor

from ._common.options import CompressionOptions
from ._torch.adam_step import MomentsInMemory, attach, moments_in_memory, own_memory
from ._torch.ddp_buckets import DdpBuckets
from ._torch.ddp_options import DdpOptions
from ._torch.ddp_transport import GroupTransport, own_transport
from ._torch.first_step import expect_hook, forget_hook, hook_was_called
from ._torch.gradients import named
from ._torch.saved_state import to_numpy, to_torch

__all__ = ["CompressionOptions", "CompressionState", "comm_hook"]

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class CompressionState:
    """How gradients are compressed, and what has to be remembered between steps.

    There is one for each model. Make it on all ranks of the process group, in the same order as other groups, because it
    makes a group of its own: at once, or in `register` if torch.distributed is not initialized yet.

    It may be made before the model and the optimizer exist: without both, `register` tells it of them. If neither is ever
    told, the first backward() shows the parameters, which are numbered, and the default is that of SGD.

    Unlike torch's PowerSGDState, there is no step before which compression must not start: DDP rebuilds its buckets after
    the first step, and what is remembered follows its tensors.

    Args:
        named_parameters: module.named_parameters(), of the module that DDP wraps. Names appear in rules and in state_dict();
            without them, parameters are numbered.
        compression: See CompressionOptions.
        optimizer: The optimizer of the parameters, for memories "momentum" and "adam", which take over moments of
            torch.optim.Adam and AdamW, and "muon", which makes the updates of torch.optim.Muon. Or several that share the
            parameters among them, for example a Muon and an AdamW; each gets the default of its kind if all of them have one.
            Without it the hook cannot know what the optimizer does: "adam" and "muon" are refused then, and with "momentum"
            beta1 has to be 0.
        process_group: The one that DDP was given; None for all ranks.
        backend: The backend of the group that carries what is sent; None for that of process_group. Whatever the backend,
            containers are made on the host: with "nccl" they travel by way of this rank's accelerator, with "gloo" directly.
        timeout: A datetime.timedelta after which that group's collectives fail on ranks that wait for others; None for the
            backend's default, which is long. (torch.distributed does not hand on that of process_group.)
        **options: All others of CompressionOptions.

    Raises:
        ConfigError: Specs, parts or arguments cannot work.
        TypeError: An option is unknown.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: str | dict | Compressor | None = None,
        *,
        optimizer: Optimizers | None = None,
        process_group: dist.ProcessGroup | None = None,
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
        **options: Any,
    ):
        self._options = DdpOptions.from_keywords(options, compression=compression)
        self._options.check_parts()
        self._make_group = functools.partial(own_transport, process_group, backend, timeout)
        self._transport: GroupTransport | None = None
        self._buckets: DdpBuckets | None = None  # once the parameters and the optimizers are known
        self._saved: dict | None = None  # what was loaded before
        self._parameters = named([] if named_parameters is None else list(named_parameters))
        self._optimizers: Callable[[], list[torch.optim.Optimizer]] = functools.partial(_listed, optimizer)
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._expects: Callable[[torch.optim.Optimizer], bool] | None = None  # what an adapter knows of `_owns`
        self._detach: list[Callable[[], None]] = []
        if named_parameters is not None or optimizer is not None:
            self._complete()
        elif dist.is_initialized():
            self._join(None)
        expect_hook(self)

    def register(
        self, model: DistributedDataParallel, optimizer: Optimizers | Callable[[], Optimizers] | None = None
    ) -> None:
        """Let a model exchange its gradients by this state, as model.register_comm_hook(state, comm_hook) does.

        A state that was made without parameters and optimizer takes both from here. Call it on all ranks.

        Args:
            model: The model, on which no hook is registered yet.
            optimizer: See CompressionState. Or a function that returns it, for one that does not exist yet: it is called in
                the first backward(), or in the first step if that comes before.

        Raises:
            ConfigError: The model is no DistributedDataParallel, has a hook, or is of another process group; the state has a
                model, or an optimizer, already; or CompressionState raises it.
        """
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(f"register takes a DistributedDataParallel, not {type(model).__name__}")
        if self._model is not None:
            raise ConfigError("this state is registered already: make one CompressionState for each model")
        if self._buckets is not None and optimizer is not None:
            raise ConfigError("give the optimizer to CompressionState, beside named_parameters, or both to register only")
        self._join(model.process_group)
        try:
            model.register_comm_hook(self, comm_hook)
        except RuntimeError as error:
            raise ConfigError(f"the model takes no hook: {error}") from error
        self._model = weakref.ref(model)
        if self._buckets is None:
            self._parameters = named(list(model.module.named_parameters()))
            if callable(optimizer):
                self._optimizers = lambda: _listed(optimizer())
            else:
                self._optimizers = functools.partial(_listed, optimizer)
                self._complete()

    def _join(self, expected: dist.ProcessGroup | None) -> GroupTransport:
        """Makes the group if there is none, of the same ranks as the expected one if no other was given."""
        if self._transport is None:
            self._transport = self._make_group(expected)
            self.rank, self.ranks = self._transport.rank, self._transport.size
        if expected is not None and dist.get_process_group_ranks(expected) != self._transport.members:
            raise ConfigError(
                f"the model's process group has ranks {dist.get_process_group_ranks(expected)}, and that of the state "
                f"{self._transport.members}: pass the same process_group to both"
            )
        return self._transport

    def _complete(self) -> DdpBuckets:
        """Make what needs the parameters and the optimizers: a collective."""
        optimizers = self._optimizers()
        transport, shared = self._join(None), self._options
        shared.choose_defaults(_own_memories(optimizers, self._parameters), (self.rank, self.ranks))
        if not optimizers:
            shared.refuse_steps_in_memory("pass the optimizer, CompressionState(..., optimizer=optimizer)")
        if self.ranks == 1:
            shared.warn_of_one_rank(stacklevel=3)
        worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
        exchange = shared.make_exchange(transport, 1 / transport.size, worker)
        if transport.size > 1:
            watch_ranks(exchange, lambda message: transport.allgather_equal(message).wait(), np.empty(0, np.uint8))
        self._buckets = DdpBuckets(self._parameters, exchange, worker, shared, f"grace_ext.{transport.group_name}")
        if self._saved is not None:
            self._buckets.load(self._saved)
            self._saved = None
        self._optimizers = functools.partial(list, optimizers)
        for one in optimizers:
            self._detach.append(attach(one, functools.partial(_moments_in_memory, one, optimizers, self._buckets)))
        return self._buckets

    @property
    def _is_empty(self) -> bool:
        """Whether there is nothing to save: no step was made, and nothing loaded."""
        return self._buckets is None and self._saved is None

    def _release(self) -> None:
        """Leave the optimizers as they were: another state takes over the model."""
        while self._detach:
            self._detach.pop()()
        forget_hook(self)

    def _on_bucket_ready(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        hook_was_called(self)
        return (self._buckets or self._complete()).on_bucket_ready(bucket)

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """See first_step.HasHook."""
        if self._transport is not None and self.ranks == 1:
            return False
        if self._expects is not None:
            return self._expects(optimizer)
        if self._buckets is not None and (known := self._optimizers()):
            return any(one is optimizer for one in known)
        own = {id(p) for p in (self._buckets.parameters if self._buckets else self._parameters).values()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"]) if own else None

    def _prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See first_step.HasHook: torch calls hooks that one before them registers."""
        if self._buckets is None and self._model is not None and self._owns(optimizer):
            self._complete()

    def state_dict(self) -> dict:
        """This rank's memory, the number of the next step and the order of the buckets. No collective.

        Returns:
            The state, with the memories of all ranks after consolidate_state_dict(). Its arrays are tensors, so that
            torch.load(weights_only=True) reads it.
        """
        if self._buckets is None:
            return to_torch(self._saved or checkpoint.pack({"step": 0}, 0, 1, []))
        return to_torch(self._buckets.save())

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on from a saved state, in the next step.

        Call it on all ranks, each with its own file or all with one that has the memories of all ranks. If a state lacks
        this rank's memory, the memory starts from zero, which the log "grace_ext" says. Training is then bit for bit what it
        would have been if the state is of the second step or later.

        Args:
            state_dict: What `state_dict` gave.

        Raises:
            ConfigError: It is not a state of a known version. If it does not fit the model or, for on_resize="redistribute",
                some memories are missing, the next backward() raises it.
        """
        if not isinstance(state_dict, dict):
            raise ConfigError(f"load_state_dict takes what state_dict gave, not {type(state_dict).__name__}")
        saved = to_numpy(state_dict)
        checkpoint.check_version(saved)
        if self._buckets is None:
            self._saved = saved
        else:
            self._buckets.load(saved)

    def _forget(self) -> None:
        """Start from zero in the next step, as after loading a checkpoint that has nothing of this state."""
        self._saved = None
        if self._buckets is not None:
            self._buckets.load(None)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the memories of all ranks for state_dict() on rank `to`, until the next step: a collective.

        Args:
            to: The rank that will save them.
        """
        if self._buckets is not None:
            self._buckets.consolidate(to)

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage, in total and of the last step.

        Returns:
            What docs/observability.md describes.

        Raises:
            ConfigError: No model is known yet.
        """
        if self._buckets is None:
            raise ConfigError("there are no figures before the first backward() of a registered model")
        return self._buckets.exchange.stats()


def _listed(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())


def _own_memories(
    optimizers: Sequence[torch.optim.Optimizer], parameters: dict[str, torch.nn.Parameter]
) -> str | dict[str, str] | None:
    """The memory that makes the optimizers' steps, by names of parameters if it is not the same for all; None if one has none.

    Raises ConfigError where names are missing.
    """
    specs = [own_memory(optimizer) for optimizer in optimizers]
    if None in specs or not specs:
        return None
    if len(set(specs)) == 1:
        return specs[0]
    names = {id(p): name for name, p in parameters.items()}
    found = {}
    for optimizer, spec in zip(optimizers, specs, strict=True):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) not in names:
                raise ConfigError("several optimizers need named_parameters, with all of their parameters")
            found[glob.escape(names[id(p)])] = spec
    return found  # type: ignore[return-value]  # none of the specs is None


def _moments_in_memory(
    optimizer: torch.optim.Optimizer, optimizers: Sequence[torch.optim.Optimizer], buckets: DdpBuckets
) -> MomentsInMemory | None:
    """Raises ConfigError where a memory has to take over a part of the step of a parameter that no optimizer has."""
    known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for bucket in buckets.exchange.buckets:
        for tensor in bucket.tensors if bucket.memory.applies_momentum else ():
            if id(buckets.parameters[tensor.name]) not in known:
                raise ConfigError(
                    f"memory {str(bucket.memory)!r} changes the steps of {tensor.name!r}, which is not among the parameters "
                    f"of the optimizer: pass all optimizers, CompressionState(..., optimizer=[…])"
                )
    return moments_in_memory(optimizer, buckets.exchange.buckets, buckets.parameters)


def comm_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Turn gradients into their average over the ranks: for model.register_comm_hook(state, comm_hook).

    The average is that of what each rank's compressed gradient tells. Encoding, sending and decoding happen in a thread of
    their own while backward goes on. Every rank that takes part gets the same bits. Where a gradient is not finite, the
    result is not finite on all ranks, and no rank's memory changes. Sparse gradients, as nn.Embedding(sparse=True) makes
    them, are exchanged as rows and stay sparse.

    Errors after the first step are raised by backward() as a RuntimeError with the error's text. They leave the memory as it
    was before the step, and the next backward() raises ExchangeError: the ranks may be out of step.

    Args:
        state: The state of this model.
        bucket: DDP's bucket.

    Returns:
        A future of the bucket's averaged gradients.

    Raises:
        ConfigError: Gradients cannot be exchanged: complex ones, and those of parameters that the state does not know; and,
            in the first step, specs that differ between ranks.
    """
    return state._on_bucket_ready(bucket)

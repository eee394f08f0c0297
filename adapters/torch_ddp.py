"""A communication hook for torch's DistributedDataParallel that compresses gradients, over Gloo and NCCL.

model = torch.nn.parallel.DistributedDataParallel(module)
model.register_comm_hook(CompressionState(module.named_parameters()), comm_hook)
"""

import concurrent.futures
import datetime
import functools
import glob
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grace_ext import ConfigError
from grace_ext.exchange.stalls import watch_ranks
from grace_ext.pipeline.compressor import Compressor

from ._common.options import CompressionOptions
from ._torch.adam_step import MomentsInMemory, attach, moments_in_memory, own_memory
from ._torch.ddp_buckets import DdpBuckets
from ._torch.ddp_transport import GroupTransport
from ._torch.gradients import named
from ._torch.process_group import own_group
from ._torch.saved_state import to_numpy, to_torch

__all__ = ["CompressionOptions", "CompressionState", "comm_hook"]


class _Options(CompressionOptions):
    absent = ("bucket_bytes", "groups")


class CompressionState:
    """How gradients are compressed, and what has to be remembered between steps.

    There is one for each model. Make it on all ranks of the process group, in the same order as other groups, because it
    makes a group of its own.

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
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        process_group: dist.ProcessGroup | None = None,
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
        **options: Any,
    ):
        shared = _Options.from_keywords(options, compression=compression)
        parameters = named([] if named_parameters is None else list(named_parameters))
        group, device = own_group(process_group, backend, timeout)
        transport = GroupTransport(group, device)
        self.rank, self.ranks = transport.rank, transport.size
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
        shared.choose_defaults(_own_memories(optimizers, parameters), (self.rank, self.ranks))
        if not optimizers:
            shared.refuse_steps_in_memory("pass the optimizer, CompressionState(..., optimizer=optimizer)")
        if self.ranks == 1:
            shared.warn_of_one_rank(stacklevel=2)
        worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
        exchange = shared.make_exchange(transport, 1 / transport.size, worker)
        if transport.size > 1:
            watch_ranks(exchange, lambda message: transport.allgather_equal(message).wait(), np.empty(0, np.uint8))
        self._buckets = DdpBuckets(parameters, exchange, worker, shared, f"grace_ext.{group.group_name}")
        for one in optimizers:
            attach(one, functools.partial(_moments_in_memory, one, optimizers, self._buckets))

    def state_dict(self) -> dict:
        """This rank's memory, the number of the next step and the order of the buckets. No collective.

        Returns:
            The state, with the memories of all ranks after consolidate_state_dict(). Its arrays are tensors, so that
            torch.load(weights_only=True) reads it.
        """
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
        self._buckets.load(to_numpy(state_dict))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the memories of all ranks for state_dict() on rank `to`, until the next step: a collective.

        Args:
            to: The rank that will save them.
        """
        self._buckets.consolidate(to)

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage, in total and of the last step.

        Returns:
            What docs/observability.md describes.
        """
        return self._buckets.exchange.stats()


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
    return state._buckets.on_bucket_ready(bucket)

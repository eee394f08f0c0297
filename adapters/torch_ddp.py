"""A communication hook for torch's DistributedDataParallel that compresses gradients, over Gloo and NCCL.

model = torch.nn.parallel.DistributedDataParallel(module)
model.register_comm_hook(CompressionState(module.named_parameters()), comm_hook)
"""

import concurrent.futures
import uuid
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grace_ext import ConfigError
from grace_ext.exchange.engine import Exchange
from grace_ext.observe import parse_observers, warn_of_one_rank
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import DEFAULT_SPEC, Rules

from ._common.stalls import introduce
from ._torch.ddp_buckets import DdpBuckets
from ._torch.ddp_transport import GroupTransport
from ._torch.gradients import check_options, named
from ._torch.saved_state import to_numpy, to_torch


class CompressionState:
    """How gradients are compressed, and what has to be remembered between steps. One for each model; make it on all ranks of
    the process group, in the same order as other groups, because it makes a group of its own.

    named_parameters: module.named_parameters(), of the module that DDP wraps. Names appear in rules and in state_dict();
        without them, parameters are numbered.
    compression: a spec ("topk:0.01/rice/qsgd:7", see `python -m grace_ext codecs`), its dict form, or a Compressor.
    memory: "residual" (error feedback), "none", "ef21", "dgc" or another (`python -m grace_ext codecs`), or specs by name
        pattern or size, as in rules: {"*embedding*": "none", "*": "residual:decay=0.9"}.
    communicator: "allgather"; "sharded" or "tree" for many ranks or slow links, "hierarchical" for several ranks a host (see
        docs/training.md); or "allreduce" for dense raw and fp16 specs, and for randomk. Dense float32 always goes by
        allreduce: the result is the same and the bytes are fewer. So do low-rank factors ("powersgd:4"), which only sums can
        carry.
    rules: {"*.bias": "dense/raw", "<=4096": "dense/raw", ...}: specs by name pattern or size, the first that fits. Without
        one, tensors of at most 1024 elements or fewer than two dimensions ride in a dense float32 bucket.
    process_group: the one that DDP was given; None for all ranks.
    backend: of the group that carries what is sent; None for that of process_group. Whatever the backend, containers are
        made on the host: with "nccl" they travel by way of this rank's accelerator, with "gloo" directly.
    timeout: a datetime.timedelta after which that group's collectives fail on ranks that wait for others; None for the
        backend's default, which is long. (torch.distributed does not hand on that of process_group.)
    selection: "host", "device" (top-k with torch operations where the gradients are, only the selected values come to
        the host) or "auto": device for tensors on an accelerator. The bytes are the same.
    seed: of the stochastic codecs; the same on all ranks.
    capture: a folder in which rank 0 saves its own gradients of steps 1, 10, 100, 1000 and 10000, before and after error
        feedback, for `python -m grace_ext bench --input FILE`; or a grace_ext.observe.Capture that names other steps.
    schedule: options of the spec that change from step to step: {"density": "warmup:steps=2000"}, or a function of the step
        that gives the same on all ranks; see grace_ext.policy.Schedules.
    on_resize: what becomes of the memories when a checkpoint of another number of ranks is loaded: "reset", they start from
        zero, or "redistribute", each rank takes over an equal part. None: redistribute, or reset with a warning where a
        checkpoint has not all of them.
    grad_scaler: the torch.amp.GradScaler of the training, if there is one: what the memory holds is then in the units of the
        gradients without loss scale, so that a scale that changes does no harm.
    observe: as in horovod_torch.DistributedOptimizer.

    Unlike torch's PowerSGDState, there is no step before which compression must not start: DDP rebuilds its buckets after
    the first step, and what is remembered follows its tensors.

    Raises ConfigError for specs, parts and arguments that cannot work.
    """

    def __init__(
        self,
        named_parameters=None,
        compression=DEFAULT_SPEC,
        *,
        memory="residual",
        communicator="allgather",
        rules=None,
        process_group=None,
        backend=None,
        timeout=None,
        selection="auto",
        seed=0,
        capture=None,
        schedule=None,
        on_resize=None,
        grad_scaler=None,
        observe=None,
    ):
        check_options(selection, grad_scaler)
        parameters = named([] if named_parameters is None else list(named_parameters))
        capture, observe = parse_observers(capture, observe)
        group, device = _own_group(process_group, backend, timeout)
        transport = GroupTransport(group, device)
        self.rank, self.ranks = transport.rank, transport.size
        if self.ranks == 1:
            warn_of_one_rank(capture, observe, stacklevel=2)
        worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
        exchange = Exchange(transport, memory, 1 / transport.size, seed, capture, worker, schedule, observe=observe)
        if transport.size > 1:
            introduce(exchange, lambda message: transport.gather(message).wait(), np.empty(0, np.uint8))
        self._buckets = DdpBuckets(
            parameters,
            exchange,
            worker,
            Rules(compression, rules, seed),
            parse_stage("communicator", communicator),
            prefix=f"grace_ext.{group.group_name}",
            selection=selection,
            on_resize=on_resize,
            grad_scaler=grad_scaler,
        )

    def state_dict(self) -> dict:
        """This rank's memory, the number of the next step and the order of the buckets; the memories of all ranks after
        consolidate_state_dict(). Its arrays are tensors, so that torch.load(weights_only=True) reads it. No collective."""
        return to_torch(self._buckets.save())

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on from a saved state, in the next step: on all ranks, each with its own file or all with one that has the
        memories of all ranks. Of a state without this rank's memory, the memory starts from zero, which the log
        "grace_ext" says. Training is then bit for bit what it would have been if the state is of the second step or later.

        Raises ConfigError for what is not a state of a version that is known; if it does not fit the model or, for
        on_resize="redistribute", some memories are missing, the next backward() does.
        """
        if not isinstance(state_dict, dict):
            raise ConfigError(f"load_state_dict takes what state_dict gave, not {type(state_dict).__name__}")
        self._buckets.load(to_numpy(state_dict))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """A collective: until the next step, state_dict() on rank `to` holds the memories of all ranks."""
        self._buckets.consolidate(to)

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage, in total and of the last step: see grace_ext.exchange.Exchange.stats."""
        return self._buckets.exchange.stats()


def comm_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For model.register_comm_hook(state, comm_hook): gradients become their average over the ranks, as far as each rank's
    compressed gradient tells it.

    Encoding, sending and decoding happen in a thread of their own while backward goes on. Every rank that takes part gets
    the same bits. Where a gradient is not finite, the result is not finite on all ranks, and no rank's memory changes.

    Sparse gradients, as nn.Embedding(sparse=True) makes them, are exchanged as rows and stay sparse.

    Raises ConfigError for gradients that cannot be exchanged: complex ones, and parameters that the state does not know;
    and, in the first step, for specs that differ between ranks. Later errors are raised by backward() as a
    RuntimeError with the error's text. They leave the memory as it was before the step, and the next backward() raises
    ExchangeError: the ranks may be out of step.
    """
    return state._buckets.on_bucket_ready(bucket)


def _own_group(process_group, backend: str | None, timeout) -> tuple:
    """(a group of the same ranks that nobody else uses, where its tensors live)."""
    if not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: call torch.distributed.init_process_group() first")
    if dist.get_rank(process_group) < 0:
        raise ConfigError("this rank does not belong to process_group")
    backend = backend or dist.get_backend(process_group)
    if process_group in (None, dist.group.WORLD):
        group = dist.new_group(backend=backend, timeout=timeout)
    else:
        group = _group_within(process_group, backend, timeout)
    return group, torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _group_within(process_group, backend: str, timeout):
    """A new group of another one's ranks; the other ranks of the job need not know of it.

    torch.distributed names such a group by the number of groups that this rank has made. Ranks that have made different
    numbers of them would wait for each other for ever (pytorch/pytorch#173608; torch 2.13), so all take a name of the first.
    """
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, dist.get_global_rank(process_group, 0), process_group)
    # A torch that names groups in another way takes no notice.
    with mock.patch.object(distributed_c10d, "_hash_ranks_to_str", lambda ranks: name[0], create=True):
        return dist.new_group(dist.get_process_group_ranks(process_group), timeout, backend, use_local_synchronization=True)

"""The exchange of gradients that come group by group, as fully_shard gives them."""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from grace_ext import ConfigError, ExchangeError
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.stalls import check_config_digests
from grace_ext.memory import Memory
from grace_ext.memory.residual import Residual
from grace_ext.pipeline.compressor import Compressor

from .._common.options import CompressionOptions
from .ddp_transport import GroupTransport
from .device import TorchBucket, behind_current_stream, on_its_device
from .parameter_groups import ParameterGroup

_MEMORIES = ("residual", "none")


class GroupExchange:
    """The exchange of what fully_shard gives group by group: a step is a backward pass, with those that are made inside it."""

    def __init__(
        self,
        model: torch.nn.Module,
        groups: list[ParameterGroup],
        transport: GroupTransport,
        options: CompressionOptions,
        prefix: str,
        weight: float = 1.0,
    ):
        self.rank, self.ranks = transport.rank, transport.size
        self._groups = groups
        self._scaler: Any = options.grad_scaler
        transport.can_fuse = False  # a bucket is waited for before the next one starts
        self._exchange = options.make_exchange(transport, weight)
        self._rules, self._selection, self._prefix = options.make_rules(), options.selection, prefix
        self._seen: set[int] = set()  # the groups that have come in this step
        self._task: int | None = None  # the backward pass, by autograd's number, with which the step ends
        self._unit = 1.0
        self._error: BaseException | None = None
        if self.ranks == 1:
            options.warn_of_one_rank(stacklevel=4)
            return
        buckets = [self._bucket(number, group) for number, group in enumerate(groups)]
        self._exchange.set_buckets(buckets)
        check_config_digests(self._exchange, lambda message: transport.allgather_equal(message).wait())
        model.register_forward_hook(_OpensSteps(self))

    def _bucket(self, number: int, group: ParameterGroup) -> Bucket:
        compressor = self._rules.choose(group.name, group.size, 2)
        if compressor.lowrank is not None:
            raise ConfigError(f"{str(compressor)!r} for {group.name!r}: slices are vectors; allowed: specs of containers")
        memory = self._memory_of(group)
        if memory.name not in _MEMORIES:
            raise ConfigError(f"memory {str(memory)!r} for {group.name!r}; allowed with slices: {', '.join(_MEMORIES)}")
        bucket = self._make_bucket(f"{self._prefix}{number}", group, compressor)
        return on_its_device(bucket, self._selection, self._rules.small)

    def _memory_of(self, group: ParameterGroup) -> Memory:
        return self._exchange.memory_of(Tensor(group.name, group.size, 2))

    def _make_bucket(self, name: str, group: ParameterGroup, compressor: Compressor) -> Bucket:
        raise NotImplementedError

    def _begin(self, number: int) -> float:
        """Begin a step if none is open; returns what gradients are divided by on their way: the scale of the loss."""
        if self._error is not None:
            raise ExchangeError(
                "an earlier exchange of gradients failed, so the ranks may be out of step: restart from a checkpoint"
            ) from self._error
        if number in self._seen:
            raise ExchangeError(
                f"{self._groups[number].name!r}: gradients come for the second time in a backward pass; after one that has raised "
                f"an error, restart from a checkpoint"
            )
        if not self._seen:
            self._open()
            if self._task is None:
                raise self._failed(
                    ConfigError(
                        f"{self._groups[number].name!r}: gradients come from a backward pass inside another one, as "
                        f"torch.utils.checkpoint makes it with use_reentrant=True, and no output of a call of the whole model shows "
                        f"where the outer one ends; allowed: use_reentrant=False, or model(...) outside of checkpoint"
                    )
                )
            self._unit = 1.0 if self._scaler is None else self._scaler.get_scale()
        self._seen.add(number)
        return self._unit

    def _open(self) -> None:
        """Let the step end with the backward pass that runs now, unless that is one inside another."""
        task = torch._C._current_graph_task_id()
        if self._seen or task == self._task or _is_nested():
            return
        self._task = task
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # Twice, since fully_shard reduces what is left in a callback of its own, which may come behind the first.
        queue(lambda: queue(functools.partial(self._end, task)))

    def _placed(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as float32 where the bucket is encoded."""
        bucket = self._exchange.buckets[number]
        device = bucket.device if isinstance(bucket, TorchBucket) else "cpu"
        return gradient.detach().to(device, torch.float32)

    def _run(self, number: int, pack: Callable[[torch.Tensor], None], out: torch.Tensor) -> None:
        """Exchange a bucket in the thread of backward, as all ranks do in the same order. pack(into): writes the gradient."""
        bucket = self._exchange.buckets[number]
        given, result = pack, out
        if not isinstance(bucket, TorchBucket):
            given, result = lambda into: pack(torch.from_numpy(into)), out.numpy()
        elif torch.device(bucket.device).type == "cuda":
            given = behind_current_stream(bucket, pack)
        try:
            self._exchange.start(bucket, given)
            self._exchange.finish(bucket, result)
        except BaseException as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> BaseException:
        """Note an error, after which the ranks may be out of step: nothing is exchanged any more. Returns it."""
        self._error = error
        self._exchange.abort()
        return error

    def _end(self, task: int) -> None:
        """The backward pass with this number has ended."""
        if task != self._task:  # another one has opened the step since
            return
        self._task = None
        if self._seen:  # not so where gradients are accumulated
            self._seen.clear()
            self._exchange.end_step()

    def state_dict(self) -> dict:
        """This rank's memory and the number of the next step, for a checkpoint of torch.distributed.checkpoint or any other.

        Call it between steps. No collective. Its keys name the rank, so that every rank's own part is saved.

        Returns:
            {"rank0": {"step": int64 tensor, "residual": {name: float32 tensor}}}, with the number of this rank.
        """
        state = self._exchange.state_dict()
        kept = {
            tensor.name: torch.zeros(tensor.size, dtype=torch.float32)
            for bucket in self._exchange.buckets
            if isinstance(bucket.memory, Residual)
            for tensor in bucket.tensors
        }
        kept |= {name: torch.from_numpy(array) for name, array in state.get("residual", {}).items()}
        return {f"rank{self.rank}": {"step": torch.tensor(state["step"]), "residual": kept}}

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on from a saved state, bit for bit. A collective: call it on all ranks, as torch.distributed.checkpoint does.

        Args:
            state_dict: What `state_dict` gave on this rank, among as many ranks. With another number of ranks, leave it out:
                memories then start from zero.

        Raises:
            ConfigError: It is not of this rank, or does not fit the model, or the ranks have states of different steps.
        """
        own = state_dict.get(f"rank{self.rank}") if isinstance(state_dict, dict) else None
        if own is None:
            raise ConfigError(f"load_state_dict takes what state_dict gave on this rank, {self.rank}")
        names = {tensor.name for bucket in self._exchange.buckets for tensor in bucket.tensors}
        unknown = sorted(own["residual"].keys() - names)
        if unknown:
            raise ConfigError(f"the state has {unknown[0]!r}, which is no slice of this model among {self.ranks} ranks")
        residual = {name: tensor.detach().cpu().numpy() for name, tensor in own["residual"].items()}
        step = int(own["step"])
        self._exchange.load_state_dict({"step": step, "residual": residual})
        if self.ranks > 1:
            message = np.array([step], "<i8").view(np.uint8)
            steps = self._exchange.transport.allgather(f"{self._prefix}.step", message).wait().view("<i8")
            if (steps != step).any():
                raise ConfigError(f"the ranks have loaded states of different steps: {steps.tolist()}")

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage, in total and of the last step.

        Returns:
            What docs/observability.md describes; gradients are those of the slices that are sent.
        """
        return self._exchange.stats()


class _OpensSteps:
    """A forward hook of the model: the backward pass that comes to an output of it is the one with which the step ends.

    Below the outermost backward pass there may be others, in which reentrant checkpointing recomputes a block.
    """

    def __init__(self, exchange: GroupExchange):
        self._exchange = weakref.ref(exchange)  # the model may get another one

    def __call__(self, _module: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        if self._exchange() is not None:
            for one in tree_leaves(outputs):
                if isinstance(one, torch.Tensor) and one.requires_grad:
                    one.register_hook(self._open)

    def _open(self, _gradient: torch.Tensor) -> None:
        exchange = self._exchange()
        if exchange is not None:
            exchange._open()


def _is_nested() -> bool:
    """Whether the backward pass that runs now was started by a node of another one, in whose thread it runs."""
    in_pass = False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_qualname
        if in_pass and name == "BackwardCFunction.apply":  # by which torch calls the backward of a function in Python
            return True
        in_pass |= name == "_engine_run_backward"
        frame = frame.f_back
    return False

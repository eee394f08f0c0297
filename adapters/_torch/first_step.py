"""Notices that an optimizer steps with gradients which no communication hook has exchanged."""

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from grace_ext import ConfigError

HOW_TO_REGISTER = (
    "register it before the first backward(), with state.register(model, optimizer) or model.register_comm_hook(state, "
    "comm_hook), on a DistributedDataParallel; Lightning's DDPStrategy ignores hooks on CPU, so use "
    "grace_ext.adapters.lightning.CompressedDDPStrategy"
)


class WaitsForHook(Protocol):
    """A state whose hook has not been called yet."""

    def _steps_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of this optimizer's parameters are the state's to exchange, as far as it knows."""


_waiting: "weakref.WeakSet[WaitsForHook]" = weakref.WeakSet()


def expect_hook(state: WaitsForHook) -> None:
    """Raise after the first step of the state's optimizer, unless `hook_was_called` comes before."""
    _waiting.add(state)


def hook_was_called(state: WaitsForHook) -> None:
    """The state's hook works."""
    _waiting.discard(state)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """After the step, not before: a closure computes the gradients in it.

    Raises ConfigError. A step without gradients, or with zeros, needs no exchange: tools make one to have states to load.
    """
    if not _waiting or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    forgotten = [state for state in list(_waiting) if state._steps_with(optimizer)]
    if forgotten and _has_gradients(p.grad for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} has made a step with gradients that no rank has sent: the hook of a CompressionState "
            f"was never called (a backward() inside no_sync() does not call it); {HOW_TO_REGISTER}"
        )


def _has_gradients(gradients: Iterable[torch.Tensor | None]) -> bool:
    return any(one is not None and (one.layout != torch.strided or bool(one.any())) for one in gradients)


register_optimizer_step_post_hook(_after_step)

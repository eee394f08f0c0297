"""What states with a communication hook have to do with an optimizer's first step.

It may contain the first backward(), in a closure, so what changes the step has to be there when it begins. And a step with
gradients that no hook has exchanged is an error.
"""

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grace_ext import ConfigError

HOW_TO_REGISTER = (
    "register it before the first backward(), with state.register(model, optimizer) or model.register_comm_hook(state, "
    "comm_hook), on a DistributedDataParallel; Lightning's DDPStrategy ignores hooks on CPU, so use "
    "grace_ext.adapters.lightning.CompressedDDPStrategy"
)


class HasHook(Protocol):
    """A state with a hook."""

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Whether the gradients of this optimizer's parameters are the state's to exchange; None if it cannot know yet."""

    def _prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step, while the hook has not been called."""


_waiting: "weakref.WeakSet[HasHook]" = weakref.WeakSet()
_called: "weakref.WeakSet[HasHook]" = weakref.WeakSet()


def expect_hook(state: HasHook) -> None:
    """Raise after the first step of the state's optimizer, unless `hook_was_called` comes before."""
    _waiting.add(state)


def hook_was_called(state: HasHook) -> None:
    """The state's hook works."""
    _waiting.discard(state)
    _called.add(state)


def forget_hook(state: HasHook) -> None:
    """The state is out of use."""
    _waiting.discard(state)
    _called.discard(state)


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for state in list(_waiting):
        state._prepare_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """After the step, not before: a closure computes the gradients in it.

    Raises ConfigError. A step without gradients, or with zeros, needs no exchange: tools make one to have states to load.
    """
    if not _waiting or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if all(state._owns(optimizer) is False for state in list(_waiting)):
        return
    if any(state._owns(optimizer) for state in list(_called)):
        return  # what waits and does not know for what, waits for something else
    if _has_gradients(p.grad for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} has made a step with gradients that no rank has sent: the hook of a CompressionState "
            f"was never called (a backward() inside no_sync() does not call it); {HOW_TO_REGISTER}"
        )


def _has_gradients(gradients: Iterable[torch.Tensor | None]) -> bool:
    return any(one is not None and (one.layout != torch.strided or bool(one.any())) for one in gradients)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)

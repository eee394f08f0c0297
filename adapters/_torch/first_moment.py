"""Adam's step where the memory has the first moment already."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from grace_ext.exchange.buckets import Bucket

#: Optimizers that keep nothing in their param_groups from step to step, and whose first moment may be left out by beta1 = 0.
TAKES_OVER = (torch.optim.Adam, torch.optim.AdamW)


class FirstMoments:
    """Leaves out an optimizer's own first moment, while it steps, for parameters whose memory applies it.

    The optimizer's param_groups are what the user set, except during a step. So learning-rate schedulers, checkpoints and a
    later training without compression find Adam as it was.

    Args:
        optimizer: The optimizer.
        buckets: The exchange's buckets.
        parameters: The parameters by the names of the buckets' tensors.

    Raises:
        ConfigError: A memory and the optimizer would both apply a momentum.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket], parameters: dict):
        #: By id of a parameter, the memory that applies its momentum.
        self._memories = {
            id(parameters[tensor.name]): bucket.memory
            for bucket in buckets
            if bucket.memory.applies_momentum
            for tensor in bucket.tensors
        }
        self._optimizer = optimizer
        takes_over = isinstance(optimizer, TAKES_OVER)
        for group in optimizer.param_groups:
            momentum = group.get("momentum") or group.get("betas", (0,))[0]
            for memory in {self._memories[id(p)] for p in group["params"] if id(p) in self._memories} if momentum else ():
                memory.check_optimizer(type(optimizer).__name__, momentum, takes_over)

    @contextmanager
    def left_to_memory(self) -> Iterator[None]:
        """Inside, the optimizer has beta1 = 0 for parameters whose memory keeps the first moment."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [part for group in groups for part in self._split(group)]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups

    def _split(self, group: dict) -> list[dict]:
        """The group, or its two parts, of parameters whose memory keeps the first moment and of others."""
        kept = [p for p in group["params"] if id(p) in self._memories]
        if not kept or not group.get("betas", (0,))[0]:
            return [group]
        others = [p for p in group["params"] if id(p) not in self._memories]
        without = {**group, "params": kept, "betas": (0.0, *group["betas"][1:])}
        return [without, {**group, "params": others}] if others else [without]


def leave_to_memory(optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket], parameters: dict) -> FirstMoments | None:
    """The first moments of an optimizer in the step that begins.

    Args:
        optimizer: See FirstMoments.
        buckets: See FirstMoments.
        parameters: See FirstMoments.

    Returns:
        The first moments; None if no memory applies a momentum.

    Raises:
        ConfigError: A memory and the optimizer would both apply a momentum.
    """
    if not any(bucket.memory.applies_momentum for bucket in buckets):
        return None
    return FirstMoments(optimizer, buckets, parameters)


def attach(optimizer: torch.optim.Optimizer, first_moments: Callable[[], FirstMoments | None]) -> None:
    """Leave first moments to the memory in all steps of an optimizer that is not wrapped.

    Args:
        optimizer: The optimizer.
        first_moments: What `leave_to_memory` gives for the buckets there are now.
    """
    inside = ExitStack()

    def before(*_: object) -> None:
        inside.close()  # of a step that failed
        moments = first_moments()
        if moments is not None:
            inside.enter_context(moments.left_to_memory())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: inside.close())

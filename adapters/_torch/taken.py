"""What stands in a parameter's .grad while its gradient is exchanged."""

from collections.abc import Iterable
from typing import Any

import torch

from grace_ext import ExchangeError


class TakenGradient(torch.Tensor):
    """The place of a gradient that the exchange has taken over, so that its memory is free once it is encoded.

    It has the parameter's shape, dtype and device, and no elements: all that would read or change them raises ExchangeError.
    """

    @staticmethod
    def __new__(cls, p: torch.Tensor) -> "TakenGradient":
        """Make one for a parameter."""
        return torch.Tensor._make_wrapper_subclass(cls, p.shape, p.stride(), dtype=p.dtype, device=p.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _WITHOUT_ELEMENTS:
            return args[0]
        raise ExchangeError(
            f"{func}: the gradient of a parameter was used between backward() and step(), while it is being exchanged. Call "
            f"optimizer.synchronize() first, for example to clip gradients, and make the step in optimizer.skip_synchronize(); "
            f"if backward() is called several times before step(), increase backward_passes_per_step"
        )

    def __repr__(self) -> str:
        return f"TakenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


_WITHOUT_ELEMENTS = (torch.ops.aten.detach.default,)  # as Parameter.grad's setters and getters may call it


class TakenGradients:
    """Takes gradients out of parameters, and remembers where they were."""

    def __init__(self) -> None:
        self._stand_ins: dict[torch.nn.Parameter, TakenGradient] = {}  # made once for each parameter
        self._taken: list[torch.nn.Parameter] = []

    def take(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Put a stand-in in the place of the gradients of those that have one."""
        for p in parameters:
            if p.grad is None:
                continue
            try:
                p.grad = self._stand_ins[p]
            except (KeyError, RuntimeError):  # none yet, or the parameter's shape, dtype or device has changed
                p.grad = self._stand_ins[p] = TakenGradient(p)
            self._taken.append(p)

    def forget(self) -> None:
        """The step is over: where no result has taken the place of a stand-in, there is no gradient."""
        for p in self._taken:
            if isinstance(p.grad, TakenGradient):
                p.grad = None
        self._taken.clear()

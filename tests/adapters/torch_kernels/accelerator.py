"""Tensors that stand for an accelerator's: they lie on the CPU, but what is copied to the host is counted, and what would
make the host wait without saying so raises.
"""

import dataclasses

import torch
from torch.overrides import TorchFunctionMode

WAITS = {"item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique", "equal", "numpy"}
FACTORIES = {"zeros", "empty", "full", "ones", "tensor", "arange"}
COPIES = {"cpu", "tolist"}


class OnAccelerator(torch.Tensor):
    """A tensor of the accelerator. All that is computed from one is one, too."""


@dataclasses.dataclass
class Crossings:
    """What came to the host: how often, and bytes."""

    times: int = 0
    nbytes: int = 0


class Accelerator(TorchFunctionMode):
    """While it is active, what is made with a device or moved to one is on the accelerator."""

    def __init__(self):
        super().__init__()
        self.crossings = Crossings()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        own = args[0] if args and isinstance(args[0], OnAccelerator) else None
        if own is not None and name in WAITS:
            raise AssertionError(f"{name} makes the host wait for the accelerator")
        if own is not None and name == "__getitem__" and _has_mask(args[1]):
            raise AssertionError("a mask as an index makes the host wait for the accelerator")
        if own is not None and name in COPIES:
            self.crossings.times += 1
            self.crossings.nbytes += own.numel() * own.element_size()
            return function(own.as_subclass(torch.Tensor), *args[1:], **kwargs)
        result = function(*args, **kwargs)
        if name in FACTORIES and kwargs.get("device") is not None or name == "to" and _names_device(args[1:], kwargs):
            return result.as_subclass(OnAccelerator)
        return result


def _has_mask(index) -> bool:
    return any(
        isinstance(one, torch.Tensor) and one.dtype == torch.bool
        for one in (index if isinstance(index, tuple) else (index,))
    )


def _names_device(args, kwargs) -> bool:
    return "device" in kwargs or any(isinstance(one, str | torch.device) for one in args)

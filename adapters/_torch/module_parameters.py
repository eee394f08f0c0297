"""A torch module as the engine of rounds sees it."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.rounds import Parameters
from grace_ext.rounds.parameters import check_own
from grace_ext.transport.base import Transport

from .parameter_buckets import as_tensor


class ModuleParameters(Parameters):
    """The parameters that require gradients now, whatever their dtype, device and strides, and the floating-point buffers.

    optimizers: whose states are dropped where they are not finite. average_buffers: whether buffers take part.
    """

    def __init__(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], average_buffers: bool):
        self._module, self._optimizers = module, optimizers
        for name, p in module.named_parameters():
            if torch.nn.parameter.is_lazy(p) or hasattr(p, "full_tensor"):
                raise ConfigError(
                    f"parameter {name!r} is of type {type(p).__name__}; allowed: parameters with a shape, whole on each rank"
                )
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ConfigError("the model has no parameter that requires a gradient")
        for name, p in self._parameters.items():
            if not p.is_floating_point() or p.layout != torch.strided:
                raise ConfigError(f"parameter {name!r} is {p.dtype}, {p.layout}; allowed: real floating point, dense")
        self.check()
        buffers = dict(module.named_buffers())
        #: What is the same on all ranks at the start, but takes no part in rounds: frozen parameters, and all buffers.
        self.others = {name: p.data for name, p in module.named_parameters() if not p.requires_grad} | buffers
        self._buffers = [buffer for buffer in buffers.values() if average_buffers and buffer.is_floating_point()]
        kept = module.state_dict(keep_vars=True).keys()
        self._own = {name: buffer for name, buffer in buffers.items() if name in kept}

    def check(self) -> None:
        now = dict(self._module.named_parameters())
        wrong = [name for name, p in now.items() if p.requires_grad and name not in self._parameters]
        wrong += [name for name, p in self._parameters.items() if now.get(name) is not p]
        if wrong:
            raise ConfigError(
                f"parameters {', '.join(wrong[:5])} were unfrozen, added, removed or replaced (as by load_state_dict(assign=True)) "
                "after the rounds of local steps were made, and would become each rank's own; allowed: such a change after "
                "synchronize() on all ranks, and then a new LocalSteps"
            )
        known = {id(p) for p in now.values()}
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        others = [tuple(p.shape) for group in groups for p in group if p.requires_grad and id(p) not in known]
        if others:
            raise ConfigError(
                f"an optimizer has {len(others)} parameters that are not the model's, the first one of shape {others[0]}: they would "
                "become each rank's own; allowed: a module that contains all parameters of the optimizers, or a LocalSteps for each "
                "module with its optimizer. What is to stay each rank's own belongs to an optimizer that is not given here"
            )

    def tensors(self) -> list[Tensor]:
        # All vectors are made on the host, so tensors of several devices may share a bucket.
        tensors = [as_tensor(name, p) for name, p in self._parameters.items()]
        return [Tensor(tensor.name, tensor.size, tensor.ndim, shape=tensor.shape) for tensor in tensors]

    @torch.no_grad()
    def read(self, name: str, out: np.ndarray) -> None:
        p = self._parameters[name]
        torch.from_numpy(out).view(p.shape).copy_(p)

    @torch.no_grad()
    def moved(self, name: str, shared: np.ndarray, out: np.ndarray) -> None:
        p = self._parameters[name]
        start = torch.from_numpy(shared).view(p.shape)
        if p.dtype != torch.float32:
            start = start.to(p.dtype).float()
        torch.sub(start, p.detach().to("cpu", torch.float32), out=torch.from_numpy(out).view(p.shape))

    @torch.no_grad()
    def assign(self, name: str, shared: np.ndarray, keep: float) -> None:
        _mix(self._parameters[name], torch.from_numpy(shared), keep)

    def copy(self) -> list[torch.Tensor]:
        """Of all parameters, for `restore`."""
        return [p.detach().clone() for p in self._parameters.values()]

    @torch.no_grad()
    def restore(self, copies: list[torch.Tensor]) -> None:
        """Return to what `copy` gave."""
        for p, own in zip(self._parameters.values(), copies, strict=True):
            p.copy_(own)

    def read_buffers(self) -> np.ndarray:
        if not self._buffers:
            return np.empty(0, np.float32)
        return torch.cat([buffer.detach().to("cpu", torch.float32).flatten() for buffer in self._buffers]).numpy()

    @torch.no_grad()
    def assign_buffers(self, averaged: np.ndarray, keep: float) -> None:
        parts = torch.from_numpy(averaged).split([buffer.numel() for buffer in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            _mix(buffer, part, keep)

    def save_own(self, parameters: bool) -> dict[str, np.ndarray]:
        own = self._own | (self._parameters if parameters else {})
        return {name: _bytes_of(tensor).copy() for name, tensor in own.items()}

    @torch.no_grad()
    def load_own(self, saved: Mapping[str, np.ndarray]) -> None:
        known = self._own | self._parameters
        check_own(saved, {name: tensor.numel() * tensor.element_size() for name, tensor in known.items()})
        for name, content in saved.items():
            _take_bytes(known[name], content)

    def recovered(self) -> None:
        """Moments that are not finite would spoil the next step again: such a parameter's begin anew."""
        for optimizer in self._optimizers:
            for p in [p for p, state in optimizer.state.items() if not _is_finite(state.values())]:
                del optimizer.state[p]

    @torch.no_grad()
    def begin_optimizers(self) -> None:
        """Let optimizers without a state have that of a step without gradients, which changes no parameter here."""
        for optimizer in self._optimizers:
            if not optimizer.state:
                parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
                before = [p.clone() for p in parameters]
                for p in parameters:
                    p.grad = torch.zeros_like(p)
                optimizer.step()
                for p, own in zip(parameters, before, strict=True):
                    p.copy_(own)
                optimizer.zero_grad()


def _mix(tensor: torch.Tensor, shared: torch.Tensor, keep: float) -> None:
    """In float32 on the host, so that ranks of different devices round alike."""
    values = shared.view(tensor.shape)
    tensor.copy_(tensor.to("cpu", torch.float32).mul(keep).add_(values, alpha=1 - keep) if keep else values)


def _is_finite(values: Iterable) -> bool:
    return all(
        bool(torch.isfinite(value).all()) if isinstance(value, torch.Tensor) else math.isfinite(value)
        for value in values
        if isinstance(value, torch.Tensor | float)
    )


@torch.no_grad()
def take_from_first(transport: Transport, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
    """Give all ranks what the first has of these, in place: a collective."""
    for name, tensor in tensors.items():
        payload = _bytes_of(tensor) if transport.rank == 0 else np.empty(0, np.uint8)
        _take_bytes(tensor, transport.broadcast(f"{prefix}.{name}", payload, 0).wait())


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """uint8[n]"""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _take_bytes(tensor: torch.Tensor, content: np.ndarray) -> None:
    tensor.copy_(torch.from_numpy(content.copy()).view(tensor.dtype).view(tensor.shape))

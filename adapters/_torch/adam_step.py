"""The step of an Adam where the memory keeps one of its moments or both, and of a Muon whose updates the memory makes."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from grace_ext import ConfigError
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.kernels.second_moment import factored_step
from grace_ext.memory import Memory
from grace_ext.memory.arrays import NumpyArrays
from grace_ext.memory.muon import spec_of

from .host_arrays import flat, kernels_are_faster, suit_kernels
from .mailbox import to_device, to_host

#: Optimizers that keep nothing in their param_groups from step to step, and whose first moment may be left out by beta1 = 0.
TAKES_OVER = (torch.optim.Adam, torch.optim.AdamW)
#: What has begun in the step that an optimizer makes now, each with the function by which it was attached.
_BEGUN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_MUON: tuple[type, ...] = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()  # since torch 2.9


def own_memory(optimizer: torch.optim.Optimizer) -> str | None:
    """Say which memory can make the steps of an optimizer.

    Args:
        optimizer: The optimizer.

    Returns:
        The memory's spec: "adam" for a plain Adam or AdamW, "muon" with its options for a Muon whose groups agree on them; None
        for all others.
    """
    kind, groups = _kind(optimizer), optimizer.param_groups
    if kind == "muon":
        specs = {spec_of(group) for group in groups}
        return specs.pop() if len(specs) == 1 else None
    return None if any(_has_own_step(group) for group in groups) else kind


def _kind(optimizer: torch.optim.Optimizer) -> str | None:
    """What Memory.check_optimizer calls kind."""
    return "adam" if isinstance(optimizer, TAKES_OVER) else "muon" if isinstance(optimizer, _MUON) else None


def _has_own_step(group: dict) -> bool:
    """Whether the step is another one than Adam's, or one that autograd differentiates."""
    return bool(group.get("amsgrad") or group.get("differentiable"))


class MomentsInMemory:
    """What a step of an optimizer leaves to the memories of its parameters.

    Between `begin` and `finish`, or inside `left_to_memory`, the optimizer has beta1 = 0 for parameters whose memory keeps
    the first moment, and does not see those whose memory keeps both moments or makes Muon's updates: `finish` makes their
    step. Outside, its param_groups are what the user set. So learning-rate schedulers, checkpoints and a later training
    without compression find the optimizer as it was.

    Args:
        optimizer: The optimizer.
        buckets: The exchange's buckets.
        parameters: The parameters by the names of the buckets' tensors.

    Raises:
        ConfigError: A memory and the optimizer do not fit together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket], parameters: dict):
        own = [bucket for bucket in buckets if bucket.memory.applies_momentum]
        self._memories = list({id(bucket.memory): bucket.memory for bucket in own}.values())
        #: By id of a parameter, the memory that applies its momentum, and what the memory knows the parameter as.
        self._kept: dict[int, tuple[Memory, Tensor]] = {
            id(parameters[tensor.name]): (bucket.memory, tensor) for bucket in own for tensor in bucket.tensors
        }
        self._optimizer, self._kind = optimizer, _kind(optimizer)
        self._steps: list[dict] = []  # groups of parameters whose step `finish` makes
        for group in optimizer.param_groups:
            momentum = group.get("momentum") or group.get("betas", (0,))[0]
            kept = [self._kept[id(p)][0] for p in group["params"] if id(p) in self._kept]
            for memory in {id(memory): memory for memory in kept}.values():
                memory.check_optimizer(type(optimizer).__name__, momentum, self._kind, group)
                if memory.needs_step and _has_own_step(group):
                    raise ConfigError(f"memory {str(memory)!r}: amsgrad and differentiable are not supported")

    def _refuse_shared(self, other: "MomentsInMemory") -> None:
        """Raises ConfigError if another exchange, which has begun in the same step, has a memory for the same parameter, too."""
        for p in (p for group in other._groups for p in group["params"] if id(p) in self._kept.keys() & other._kept.keys()):
            memory, tensor = self._kept[id(p)]
            raise ConfigError(
                f"two states with memory {str(memory)!r} would make the step of {tensor.name!r} in one "
                f"{type(self._optimizer).__name__}: models that share it need memory 'residual', or each an optimizer for its own "
                f"parameters, of which some are not the other model's"
            )

    @contextmanager
    def left_to_memory(self) -> Iterator[None]:
        """Inside, the optimizer makes its part of a step."""
        self.begin()
        try:
            yield
        except BaseException:
            self.give_back()
            raise
        self.finish()

    def begin(self) -> None:
        """Show the optimizer what is left of its groups."""
        self._groups, self._steps = self._optimizer.param_groups, []
        self._optimizer.param_groups = [part for group in self._groups for part in self._split(group)]

    def give_back(self) -> None:
        """Give the optimizer its groups."""
        self._optimizer.param_groups = self._groups

    def finish(self) -> None:
        """Make the steps that were left out, and give the optimizer its groups."""
        self.give_back()
        found_inf = getattr(self._optimizer, "found_inf", None)  # a GradScaler sets it for a fused Adam
        if found_inf is None or not found_inf.item():
            with torch.no_grad():
                stepped = [
                    (p, self._gradient(p), group) for group in self._steps for p in group["params"] if p.grad is not None
                ]
                elements = self._elements(stepped)
                roots = [self._roots(p, elements.get(id(p)), group) for p, _, group in stepped]  # first, since one may raise
                options = {id(group): self._options(group) for group in self._steps}
                for (p, gradient, group), root in zip(stepped, roots, strict=True):
                    self._step(p, gradient, root, options[id(group)])
        for memory in self._memories:
            memory.forget_arrivals()

    def _split(self, group: dict) -> list[dict]:
        """The group, or its two parts, of parameters whose memory keeps the first moment and of others."""
        kept = [p for p in group["params"] if id(p) in self._kept]
        left = [p for p in kept if self._kept[id(p)][0].needs_step]
        if left:
            self._steps.append({**group, "params": left})
        kept = [p for p in kept if not self._kept[id(p)][0].needs_step] if group.get("betas", (0,))[0] else []
        gone = {id(p) for p in (*left, *kept)}
        if not gone:
            return [group]
        others = [p for p in group["params"] if id(p) not in gone]
        parts = [{**group, "params": others}]
        if kept:
            parts.insert(0, {**group, "params": kept, "betas": (0.0, *group["betas"][1:])})
        return [part for part in parts if part["params"]] or [{**group, "params": []}]

    def _gradient(self, p: torch.nn.Parameter) -> torch.Tensor:
        scale = getattr(self._optimizer, "grad_scale", None)  # as found_inf
        return p.grad if scale is None else p.grad / scale

    def _elements(self, stepped: list[tuple[torch.nn.Parameter, torch.Tensor, dict]]) -> dict[int, float]:
        """By id of a parameter, the element of its gradient that Memory.denominator asks for; one copy for each device."""
        found: dict[torch.device, dict[int, torch.Tensor]] = {}
        for p, gradient, _ in stepped:
            memory, tensor = self._kept[id(p)]
            if not memory.keeps_moments and gradient.numel():
                found.setdefault(gradient.device, {})[id(p)] = _element(gradient, memory.element_needed(tensor))
        return {
            key: value
            for elements in found.values()
            for key, value in zip(elements, to_host(torch.stack(list(elements.values()))).tolist(), strict=True)
        }

    def _roots(self, p: torch.nn.Parameter, element: float | None, group: dict) -> tuple[np.ndarray, np.ndarray] | None:
        """What Memory.denominator gives; None with Memory.moments. element: see _elements; None for a tensor without any."""
        memory, tensor = self._kept[id(p)]
        if memory.keeps_moments:
            return None
        return memory.denominator(tensor, lambda _: 0.0 if element is None else element, float(group["lr"]))

    def _options(self, group: dict) -> "_StepOptions":
        sign, decay, shrink = -1 if group.get("maximize") else 1, 0.0, 1.0
        decoupled = isinstance(self._optimizer, (torch.optim.AdamW, *_MUON))
        if group.get("decoupled_weight_decay", decoupled):
            shrink = float(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            decay = sign * float(group["weight_decay"])
        eps = float(group["eps"]) if self._kind == "adam" else 0.0
        one_thread = bool(eps) and not decay and kernels_are_faster()
        return _StepOptions(-sign * float(group["lr"]), eps, shrink, decay, one_thread)

    def _step(
        self,
        p: torch.nn.Parameter,
        gradient: torch.Tensor,
        roots: tuple[np.ndarray, np.ndarray] | None,
        options: "_StepOptions",
    ) -> None:
        """The step that grace_ext.memory.adam, .onebit_adam or .muon describes. roots: see _roots."""
        self._note_as_new(p)
        if roots is not None and options.one_thread and suit_kernels(p, gradient):
            factored_step(flat(p), flat(gradient), *roots, options.eps, options.value, options.shrink)
            torch.autograd.graph.increment_version(p)
            return
        memory, tensor = self._kept[id(p)]
        if options.shrink != 1:
            p.mul_(options.shrink)
        if roots is None:
            direction, denominator = _moments(memory, tensor, gradient, p, options.decay)
        else:
            direction = gradient.add(p, alpha=options.decay) if options.decay else gradient
            rows, columns = (to_device(root, p.device) for root in roots)
            denominator = _outer(rows, columns, p.shape)
        if self._kind == "adam":
            denominator = denominator.add_(options.eps)
        p.addcdiv_(direction.to(p.dtype), denominator.to(p.dtype), value=options.value)

    def _note_as_new(self, p: torch.nn.Parameter) -> None:
        """Give a parameter the state of one that was not stepped yet: Horovod's broadcast of optimizer states needs the same
        fields on all ranks, and a training that goes on without compression starts from it."""
        state = self._optimizer.state[p]
        if not state and self._kind == "muon":
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        elif not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)


class _StepOptions(NamedTuple):
    """What the steps of a group's parameters have in common.

    value: the factor of what is added, minus the learning rate. shrink: that of the parameter before. decay: of the parameter
    in the gradient. one_thread: whether a kernel of one thread, which takes half as long as one thread of torch, should make
    the step where the memory gives its denominator.
    """

    value: float
    eps: float
    shrink: float
    decay: float
    one_thread: bool


def moments_in_memory(
    optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket], parameters: dict
) -> MomentsInMemory | None:
    """What the step that begins leaves to memories.

    Args:
        optimizer: See MomentsInMemory.
        buckets: See MomentsInMemory.
        parameters: See MomentsInMemory.

    Returns:
        The moments; None if no memory applies a momentum.

    Raises:
        ConfigError: A memory and the optimizer do not fit together.
    """
    if not any(bucket.memory.applies_momentum for bucket in buckets):
        return None
    return MomentsInMemory(optimizer, buckets, parameters)


def attach(optimizer: torch.optim.Optimizer, moments: Callable[[], MomentsInMemory | None]) -> Callable[[], None]:
    """Leave moments to the memory in all steps of an optimizer that is not wrapped.

    A closure, which computes the gradients inside the step, sees the optimizer's groups as they are: what clips gradients in
    it finds all of them, and the buckets that the first step makes are there when it ends.

    Args:
        optimizer: The optimizer.
        moments: What `moments_in_memory` gives for the buckets there are now.

    Returns:
        A function that ends this.
    """
    begun = _BEGUN.setdefault(optimizer, [])

    def begin() -> None:
        left = optimizer.param_groups
        try:
            if begun:  # the others have left fewer parameters than the optimizer has
                optimizer.param_groups = begun[0][1]._groups
            found = moments()
        finally:
            optimizer.param_groups = left
        if found is not None:
            for _, other in begun:
                found._refuse_shared(other)
            found.begin()
            begun.append((moments, found))

    def before(_: torch.optim.Optimizer, given: tuple, keywords: dict) -> tuple[tuple, dict] | None:
        while any(whose is moments for whose, _ in begun):  # of a step that failed
            begun.pop()[1].give_back()
        closure = given[1] if len(given) > 1 else keywords.get("closure")
        if closure is None:
            begin()
            return None

        def closure_and_begin() -> Any:
            loss = closure()
            begin()
            return loss

        return given[:1], {**keywords, "closure": closure_and_begin}

    def after(*_: object) -> None:
        if begun:  # the last that has begun, since it found the groups that those before it had left
            begun.pop()[1].finish()

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

    def detach() -> None:
        for handle in handles:
            handle.remove()

    return detach


def _outer(rows: torch.Tensor, columns: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The outer product of a vector for the first dimension and one for all others, in the tensor's shape."""
    if not shape:
        return rows.view(()) * columns[0]
    return rows.view(-1, *[1] * (len(shape) - 1)) * columns.view(1, *shape[1:])


def _moments(
    memory: Memory, tensor: Tensor, gradient: torch.Tensor, p: torch.Tensor, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments, in the gradient's shape. decay: of the parameter p in the gradient."""
    on_host = memory.arrays_of_moments(tensor) is NumpyArrays
    flattened = flat if on_host else _flat_on_device
    first, root = memory.moments(tensor, flattened(gradient), flattened(p) * decay if decay else None)
    if on_host:
        first, root = (torch.from_numpy(one).to(gradient.device) for one in (first, root))
    return first.view(gradient.shape), root.view(gradient.shape)


def _flat_on_device(array: torch.Tensor) -> torch.Tensor:
    """Its elements in row-major order, float32 where they are."""
    return array.detach().to(torch.float32).reshape(-1)


def _element(gradient: torch.Tensor, position: int) -> torch.Tensor:
    """An element by its position in row-major order, float32 without dimensions."""
    if gradient.is_contiguous():
        return gradient.view(-1)[position].float()
    return gradient[np.unravel_index(position, gradient.shape)].float()

"""What becomes of an exchange's results in the gradients of the parameters of DistributedDataParallel."""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from grace_ext import ConfigError
from grace_ext.memory import Memory


class Result(NamedTuple):
    """What a backward pass has given a parameter.

    gradient: the exchanged one, in DDP's bucket or sparse. finite: whether memories take the step as done.
    """

    name: str
    parameter: torch.nn.Parameter
    gradient: torch.Tensor
    memory: Memory
    finite: bool


class DdpResults:
    """Gives parameters the results that DDP leaves out, and finds results that would be exchanged a second time.

    DDP leaves the gradient of a parameter alone that no rank has used. Its memory may have sent some of what waited there, and
    takes that for delivered, so the parameter has to get it. It is the same on all ranks.

    The result of a memory that applies the momentum is no gradient. Where no step of an optimizer and no zero_grad() has
    taken it, the next backward pass adds to it, and it must not be exchanged as a gradient.
    """

    def __init__(self) -> None:
        #: By id of a parameter that holds a result that is no gradient: its name, itself and the memory.
        self._held: dict[int, tuple[str, torch.nn.Parameter, Memory]] = {}
        self._stepped: set[int] = set()  # ids of parameters whose results an optimizer has taken
        self._watched: dict[int, torch.autograd.graph.Node] = {}
        _all.add(self)

    def follow_ddp(self, results: Callable[[], Iterator[Result]], parameters: dict[str, torch.nn.Parameter]) -> None:
        """Call it in the hook of DDP's last bucket. When DDP has finished, parameters that it left alone get their results.

        Outside of backward, where a rank without data takes part in the others' steps, nobody looks at gradients.
        """
        if not is_in_backward():
            return
        # Callbacks are called in the order in which they are queued, and DDP queues the one that sets the gradients when this
        # hook has returned. What that of ours queues is called after it.
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def before_ddp() -> None:
            versions = {name: _version(p.grad) for name, p in parameters.items()}
            queue(lambda: self._finish(results(), versions))

        queue(before_ddp)

    @torch.no_grad()
    def _finish(self, results: Iterator[Result], versions: dict[str, int | None]) -> None:
        for result in results:
            p, memory = result.parameter, result.memory
            if result.finite and _feeds_back(memory) and result.gradient.layout == torch.strided:
                _give(p, result.gradient, versions[result.name])
            if memory.applies_momentum and p.grad is not None and p.requires_grad:
                self._held[id(p)] = result.name, p, memory
                self._watch(p)

    def _watch(self, p: torch.nn.Parameter) -> None:
        """From now on, look at what a parameter holds before autograd adds to it."""
        if id(p) not in self._watched:
            node = torch.autograd.graph.get_gradient_edge(p).node
            node.register_prehook(functools.partial(_before_accumulation, weakref.ref(self), id(p)))
            self._watched[id(p)] = node  # without it, the hook would go with the node

    def release_empty(self, key: int) -> None:
        """A gradient is about to be added to that of the parameter with this id."""
        if key in self._held and _is_empty(self._held[key][1].grad):
            del self._held[key]

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has made a step."""
        if self._held:
            for group in optimizer.param_groups:
                self._stepped.update(id(p) for p in group["params"] if self._held.pop(id(p), None))

    def check(self) -> None:
        """Call it in the hook of DDP's first bucket, in backward. Raises ConfigError if parameters still hold results, the same
        on all ranks, that are no gradients. Those do not matter that no optimizer steps while one does step others."""
        held = [
            (name, memory)
            for key, (name, p, memory) in self._held.items()
            if (key in self._stepped or not self._stepped) and not _is_empty(p.grad)
        ]
        self._held.clear()
        if held:
            (name, memory), others = held[0], f" and {len(held) - 1} other parameters" if len(held) > 1 else ""
            raise ConfigError(
                f"{name!r}{others} still hold the result of an earlier synchronized backward pass, which no optimizer.step() and "
                f"no zero_grad() has taken. With memory {str(memory)!r} it is no gradient and must not be exchanged once more: "
                f"accumulate gradients in no_sync(), in all backward passes but the last one before a step"
            )


def is_in_backward() -> bool:
    """Whether autograd has called what is running."""
    return bool(torch._C._current_graph_task_id() != -1)


def _feeds_back(memory: Memory) -> bool:
    """Whether something of a tensor without a gradient may arrive that would be lost otherwise.

    Memories that can be put to the vote feed nothing back. Those that keep both of Adam's moments leave the step out, as Adam
    does where there is no gradient.
    """
    return memory.stateful and not memory.suits_votes and not memory.keeps_moments


def _give(p: torch.nn.Parameter, result: torch.Tensor, version: int | None) -> None:
    """Let the result be the gradient if DDP has left that alone. version: the gradient's before DDP has looked at it."""
    if p.grad is None:
        if result.any():  # on all ranks or on none
            p.grad = torch.empty_like(p).copy_(result)
    elif p.grad._version == version and p.grad.untyped_storage().data_ptr() != result.untyped_storage().data_ptr():
        p.grad.copy_(result)


def _version(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else gradient._version


def _is_empty(gradient: torch.Tensor | None) -> bool:
    return gradient is None or (gradient.layout == torch.strided and not gradient.any())


def _before_accumulation(results: "weakref.ref[DdpResults]", key: int, _: Any) -> None:
    found = results()
    if found is not None:
        found.release_empty(key)


_all: "weakref.WeakSet[DdpResults]" = weakref.WeakSet()


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for results in list(_all):
        results.release(optimizer)


register_optimizer_step_post_hook(_after_step)

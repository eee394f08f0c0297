"""Compressed gradients for Hugging Face Accelerate.

accelerator = Accelerator()
compress_gradients(accelerator)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch.nn.parallel import DistributedDataParallel

from grace_ext import ConfigError
from grace_ext.pipeline.compressor import Compressor

from ._common.subclassing import instance_like, subclass
from ._common.versions import check_version
from ._torch import rank_files
from .torch_ddp import CompressionState

__all__ = ["CompressedModels", "compress_gradients"]

_WITH_DDP = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class CompressedModels:
    """The models that an Accelerator has prepared since `compress_gradients`, which makes this.

    Args:
        accelerator: The Accelerator.
        options: Of CompressionState, by name.

    Attributes:
        states: The CompressionState of each model, in the order in which they were prepared: `states[0].compression_stats()`
            has its bytes and seconds. With one process there are none.

    Raises:
        ConfigError: See compress_gradients.
        TypeError: See compress_gradients.
    """

    def __init__(self, accelerator: Accelerator, options: dict[str, Any]):
        self.states: list[CompressionState] = []
        self._options = options
        self._modules: list[weakref.ref[torch.nn.Module]] = []  # of each state: what DistributedDataParallel wraps
        self._parameters: list[set[int]] = []  # of each: the ids of its parameters
        handler = _plain_handler(accelerator)
        # Made now, so that options which cannot work are refused where they stand, and so that the optimizer's first step
        # raises an error if Accelerate does not come to register it.
        self._next: CompressionState | None = CompressionState(**options)
        self._next._expects = self._is_prepared
        if accelerator.num_processes == 1:
            self._next._options.warn_of_one_rank(stacklevel=3)
        self._install(accelerator, handler)

    def _install(self, accelerator: Accelerator, handler: DistributedDataParallelKwargs) -> None:
        """Have what this Accelerator wraps registered."""
        self._accelerator = accelerator
        # Accelerate copies a handler's attributes and makes objects of its class, so what is new belongs to the class.
        hooked = subclass(type(handler), bases=(_Ours,), register_comm_hook=lambda _, model: self._register(model))
        accelerator.ddp_handler = instance_like(hooked, handler)

    def _follow(self, accelerator: Accelerator) -> None:
        """Another Accelerator has taken the place of the one before. Its models are other ones."""
        for state in self.states:
            state._release()
        self.states.clear()
        self._modules.clear()
        self._parameters.clear()
        self._install(accelerator, _plain_handler(accelerator))

    def _register(self, model: DistributedDataParallel) -> None:
        """What Accelerate calls when it has wrapped a model."""
        state, self._next = self._next or CompressionState(**self._options), None
        state._expects = None
        own = {id(p) for p in model.parameters()}
        state.register(model, lambda: self._optimizers_of(own))
        for number in range(len(self.states)):
            if self._is_same(number, model.module, own):  # wrapped once more, as after free_memory()
                self.states[number]._release()
                self.states[number], self._modules[number], self._parameters[number] = state, weakref.ref(model.module), own
                return
        self.states.append(state)
        self._modules.append(weakref.ref(model.module))
        self._parameters.append(own)

    def _is_same(self, number: int, module: torch.nn.Module, parameters: set[int]) -> bool:
        """Whether a state's model is this one: models that share parameters are different ones while both are prepared."""
        known = self._modules[number]()
        if known is module:
            return True
        is_prepared = any(one is known for one in self._accelerator._models)
        return self._parameters[number] == parameters and not is_prepared  # compiled anew, for example

    def _is_prepared(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(one.optimizer is optimizer for one in self._accelerator._optimizers)

    def _optimizers_of(self, parameters: set[int]) -> Sequence[torch.optim.Optimizer]:
        """Those that were prepared and have some of the parameters, without those of other models that share some.

        Raises ConfigError if there are none.
        """
        prepared = [wrapper.optimizer for wrapper in self._accelerator._optimizers]
        stepped = {id(one): {id(p) for group in one.param_groups for p in group["params"]} for one in prepared}
        found = [one for one in prepared if stepped[id(one)] & parameters]
        if not found:
            raise ConfigError(
                "no prepared optimizer has parameters of the model, so it is not known how they are stepped: prepare the "
                "optimizer with the same Accelerator, before the first backward()"
            )
        alive = [own for own, module in zip(self._parameters, self._modules, strict=True) if module() is not None]
        elsewhere = set().union(*alive) - parameters
        covered = set().union(*(stepped[id(one)] for one in found if not stepped[id(one)] & elsewhere))
        return [one for one in found if not stepped[id(one)] & elsewhere or stepped[id(one)] & parameters - covered]

    def _save(self, folder: str | os.PathLike) -> None:
        for number, state in enumerate(self.states):
            rank_files.save(state, folder, self._accelerator.process_index, number)

    def _load(self, folder: str | os.PathLike) -> None:
        rank, ranks = self._accelerator.process_index, self._accelerator.num_processes
        for number, state in enumerate(self.states):
            rank_files.load(state, folder, rank, ranks, number)


def compress_gradients(
    accelerator: Accelerator, compression: str | dict | Compressor | None = None, **options: Any
) -> CompressedModels:
    """Compress the gradients of all models that an Accelerator prepares from here on.

    Nothing else in a script changes: `accumulate`, `no_sync`, `clip_grad_norm_`, autocast and the settings of
    DistributedDataParallelKwargs do what they do without it. Each model has a CompressionState with the optimizers that
    `prepare` was given for it, so an AdamW gets the default for AdamW; models may share parameters. `save_state` writes what
    each rank remembers in a file of the checkpoint's folder, and `load_state` reads it: training goes on as if it had not
    been interrupted.

    Args:
        accelerator: The Accelerator, before `prepare` is given a model.
        compression: See CompressionOptions.
        **options: All others of CompressionState, except named_parameters, optimizer and process_group. grad_scaler is the
            Accelerator's own if none is given.

    Returns:
        The models' states.

    Raises:
        ConfigError: Accelerate is of a version that is not supported; the Accelerator does not use DistributedDataParallel,
            has prepared a model already, or has another communication hook; or CompressionState raises it.
        TypeError: An option is unknown.
    """
    check_version("accelerate")
    for name in ("named_parameters", "optimizer", "process_group"):
        if name in options:
            raise TypeError(f"{name} comes from the Accelerator")
    models = CompressedModels(accelerator, {"compression": compression, "grad_scaler": accelerator.scaler, **options})
    accelerator.register_save_state_pre_hook(lambda prepared, weights, folder: models._save(folder))
    accelerator.register_load_state_pre_hook(lambda prepared, folder: models._load(folder))
    return models


class _Ours:
    """A handler of ours."""


def _plain_handler(accelerator: Accelerator) -> DistributedDataParallelKwargs:
    """Raises ConfigError if the Accelerator cannot compress."""
    if accelerator.distributed_type not in _WITH_DDP:
        raise ConfigError(
            f"the Accelerator uses {accelerator.distributed_type.value}; gradients are compressed where it uses "
            f"DistributedDataParallel: {', '.join(kind.value for kind in _WITH_DDP[1:])}"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes == 1 and started > 1:
        raise ConfigError(
            f"the launcher started {started} processes, but Accelerate uses none but this one, so each would train a model of "
            f"its own: on CPU, pass Accelerator(cpu=True), or TrainingArguments(use_cpu=True)"
        )
    if accelerator._models:
        raise ConfigError("the Accelerator has prepared a model already: call compress_gradients() before prepare()")
    handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
    if isinstance(handler, _Ours):
        raise ConfigError("compress_gradients() was called for this Accelerator already")
    if handler.comm_hook != DDPCommunicationHookType.NO:
        raise ConfigError(f"DistributedDataParallelKwargs has comm_hook={handler.comm_hook.value}: a model takes one hook")
    return handler

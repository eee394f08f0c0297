"""Compressed gradients for Ray Train.

def train_function():  # of a TorchTrainer
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    compress_gradients(model, optimizer)
"""

import tempfile
from typing import Any, Literal

import pyarrow.fs
import ray.train
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.v2._internal.constants import is_v2_enabled
from ray.train.v2._internal.execution import train_fn_utils
from torch.nn.parallel import DistributedDataParallel

from grace_ext import ConfigError
from grace_ext.pipeline.compressor import Compressor

from ._common.subclassing import instance_like, subclass
from ._common.versions import check_version
from ._torch import rank_files
from .torch_ddp import CompressionState, Optimizers

__all__ = ["compress_gradients"]

_FROM_RAY = ("named_parameters", "process_group")


def compress_gradients(
    model: DistributedDataParallel,
    optimizer: Optimizers,
    compression: str | dict | Compressor | None = None,
    *,
    checkpoint: Checkpoint | Literal["latest"] | None = "latest",
    **options: Any,
) -> CompressionState:
    """Compress the gradients of a model in the training function of a TorchTrainer.

    Nothing else in the function changes: `no_sync`, clipping, autocast and the arguments of DistributedDataParallel in
    `parallel_strategy_kwargs` do what they do without it. Every checkpoint that a rank gives to `ray.train.report` from here on
    has a file of each rank with what that rank remembers, and this call reads them again: training goes on as if it had not been
    interrupted. Call it once for each model, in the same order whenever the training function starts.

    Args:
        model: What `ray.train.torch.prepare_model` returned.
        optimizer: The optimizer of the model's parameters, or several that share them among them.
        compression: See CompressionOptions.
        checkpoint: The one to go on from. By default that of `ray.train.get_checkpoint()`, which is there when Ray Train
            starts the function again; None to start from zero.
        **options: All others of CompressionState, except named_parameters and process_group.

    Returns:
        The model's state; its `compression_stats()` has bytes and seconds. With one worker the model is none of
        DistributedDataParallel, and the state has nothing to do.

    Raises:
        ConfigError: Ray is of a version that is not supported, or its former Ray Train V1 is switched on; this is no worker
            of Ray Train; the model is no DistributedDataParallel, or has a hook; or CompressionState raises it.
        TypeError: An option is unknown.
    """
    check_version("ray")
    if not is_v2_enabled():
        raise ConfigError("RAY_TRAIN_V2_ENABLED=0 switches Ray Train V1 on; grace_ext.adapters.ray is for V2: remove it")
    for name in _FROM_RAY:
        if name in options:
            raise TypeError(f"{name} comes from the model")
    if isinstance(checkpoint, str) and checkpoint != "latest":
        raise ConfigError(f"checkpoint={checkpoint!r}; allowed: 'latest', None, a ray.train.Checkpoint")
    worker = _worker()
    state = CompressionState(compression=compression, **options)
    if worker.get_context().get_world_size() == 1:
        state._options.warn_of_one_rank(stacklevel=2)
        return state
    state.register(model, optimizer)
    number = worker.add(state)
    start = ray.train.get_checkpoint() if isinstance(checkpoint, str) else checkpoint
    if start is not None:
        with start.as_directory() as folder:
            rank_files.load(state, folder, state.rank, state.ranks, number)
    return state


class _SavesMemories:
    """What the functions of ray.train, which call this object of Ray, do in addition."""

    _states: list[CompressionState]
    _plain: Any

    def add(self, state: CompressionState) -> int:
        """The state is saved from now on, in the place of an earlier one of the same parameters. Returns its number."""
        own = {id(p) for p in state._parameters.values()}
        for number, other in enumerate(self._states):
            if own == {id(p) for p in other._parameters.values()}:
                other._release()
                self._states[number] = state
                return number
        self._states.append(state)
        return len(self._states) - 1

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None, **arguments: Any) -> None:
        """Ray's own, with a file of every rank in the checkpoint if any rank gives one. A collective, as Ray's own is.

        Raises ConfigError on all ranks if what they give cannot be brought together.
        """
        given: list[dict[str, bool] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(given, None if checkpoint is None else _way(arguments))
        if any(given):
            _refuse_if_apart(given)
            if checkpoint is None:
                checkpoint = Checkpoint.from_directory(tempfile.mkdtemp())
                arguments["delete_local_checkpoint_after_upload"] = True
            self._write(checkpoint)
        self._plain.report(self, metrics=metrics, checkpoint=checkpoint, **arguments)

    def _write(self, checkpoint: Checkpoint) -> None:
        """Add this rank's files to a checkpoint, on whatever file system it is."""
        with tempfile.TemporaryDirectory() as folder:
            for number, state in enumerate(self._states):
                rank_files.save(state, folder, state.rank, number)
            pyarrow.fs.copy_files(
                folder, checkpoint.path, pyarrow.fs.LocalFileSystem(), destination_filesystem=checkpoint.filesystem
            )


def _worker() -> Any:
    """Ray's object for the functions of ray.train in this worker, made one of ours. Raises ConfigError elsewhere."""
    try:
        found = train_fn_utils.get_train_fn_utils()
    except RuntimeError as error:
        raise ConfigError(f"compress_gradients() is for the training function of a TorchTrainer: {error}") from error
    if not isinstance(found, _Ours):
        found = instance_like(subclass(type(found), _SavesMemories, bases=(_Ours,), _states=[]), found)
        train_fn_utils.set_train_fn_utils(found)
    return found


class _Ours:
    """An object of ours."""


def _way(arguments: dict[str, Any]) -> dict[str, bool]:
    """What other ranks have to know of how a rank gives a checkpoint."""
    mode = arguments.get("checkpoint_upload_mode", CheckpointUploadMode.SYNC)
    return {
        "by_ray": mode is not CheckpointUploadMode.NO_UPLOAD and arguments.get("checkpoint_upload_fn") is None,
        "validated": bool(arguments.get("validation") or arguments.get("validate_fn")),
    }


def _refuse_if_apart(given: list[dict[str, bool] | None]) -> None:
    """Raises ConfigError where a checkpoint of some ranks cannot have a file of the others without a change to what it is."""
    lacking = [rank for rank, way in enumerate(given) if way is None]
    ways = [way for way in given if way is not None]
    if lacking and not all(way["by_ray"] for way in ways):
        raise ConfigError(
            f"ray.train.report has no checkpoint on ranks {lacking}, and another has one with NO_UPLOAD or "
            f"checkpoint_upload_fn, so what these ranks remember would not be in it: give one of the same place on all ranks"
        )
    if given[0] is None and any(way["validated"] for way in ways):
        raise ConfigError("Ray validates a checkpoint as rank 0 says: give it, and what validates it, on rank 0")

"""What each rank remembers, in a file of its own in the folder of a framework's checkpoint."""

import logging
import os
from pathlib import Path

import torch

from grace_ext._util.files import atomic_write
from grace_ext.exchange.checkpoint import KEY

from ..torch_ddp import CompressionState

_LOG = logging.getLogger("grace_ext")


def save(state: CompressionState, folder: str | os.PathLike, rank: int, number: int = 0) -> None:
    """Write this rank's file, if a step was made. No collective, so ranks that do not save are not waited for.

    Args:
        state: The state.
        folder: The checkpoint's; it is made where it is missing, as on a host without the folder of rank 0.
        rank: This rank.
        number: Of the model, if there are several.
    """
    if state._is_empty:
        return
    os.makedirs(folder, exist_ok=True)
    with atomic_write(_path(folder, rank, number)) as part:
        torch.save(state.state_dict(), part)


def load(state: CompressionState, folder: str | os.PathLike, rank: int, ranks: int, number: int = 0) -> None:
    """Go on from this rank's file; from the files of all ranks, if the checkpoint is of another number of ranks.

    Where files are missing, memories follow `on_resize`, and the log "grace_ext" says so.

    Args:
        state: The state.
        folder: The checkpoint's.
        rank: This rank.
        ranks: How many there are.
        number: Of the model, if there are several.
    """
    own, first = (_path(folder, which, number) for which in (rank, 0))
    path = own if own.exists() else first
    if not path.exists():
        forget(state, rank)
        return
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if saved["ranks"] != ranks:
        for other in range(saved["ranks"]):
            path = _path(folder, other, number)
            if path.exists():
                saved["memories"].update(torch.load(path, map_location="cpu", weights_only=True)["memories"])
    state.load_state_dict(saved)


def forget(state: CompressionState, rank: int) -> None:
    """Start from zero after a checkpoint that has nothing of grace_ext, and say so.

    Args:
        state: The state.
        rank: This rank.
    """
    if rank == 0:
        _LOG.warning("the checkpoint has no state of grace_ext: memories start from zero")
    state._forget()


def _path(folder: str | os.PathLike, rank: int, number: int) -> Path:
    return Path(folder, f"{KEY}_{number}_rank{rank}.pt")

"""State dicts of wrapped torch optimizers. grace_ext's part has torch tensors: torch.load(weights_only=True) reads it."""

import io

import numpy as np
import torch

from .._common.state_files import gather_bytes


def to_torch(saved: dict) -> dict:
    """A saved state of grace_ext.exchange.checkpoint with tensors in place of its arrays."""
    return _convert(saved, np.ndarray, torch.from_numpy)


def to_numpy(saved: dict) -> dict:
    """A saved state with arrays in place of its tensors."""
    return _convert(saved, torch.Tensor, lambda tensor: tensor.detach().cpu().numpy())


def _convert(value, kind, convert):
    if isinstance(value, dict):
        return {key: _convert(inner, kind, convert) for key, inner in value.items()}
    return convert(value) if isinstance(value, kind) else value


def gather_memories(transport, name: str, memory: dict, to: int) -> list[dict]:
    """Gather every rank's dict of arrays, in the order of ranks, on rank `to`; elsewhere the list is empty. A collective."""
    file = io.BytesIO()
    torch.save(to_torch(memory), file)
    own = np.frombuffer(file.getbuffer(), np.uint8)
    return [
        to_numpy(torch.load(io.BytesIO(one.tobytes()), weights_only=True)) for one in gather_bytes(transport, name, own, to)
    ]

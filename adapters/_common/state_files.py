"""Saved states of any framework: as files of NumPy's, and from all ranks to one."""

import io
import json
from typing import IO, Any

import numpy as np

_CHUNK = 2**30  # bytes that one collective is trusted with, from all ranks together


def write(file: IO[bytes], state: dict) -> None:
    """Write a state of arrays and plain Python in NumPy's format (.npz): its structure as JSON, and the arrays.

    Args:
        file: The open file.
        state: Dicts, lists, numbers, texts, None and arrays. Keys that are numbers become texts.
    """
    arrays: list[np.ndarray] = []

    def number(array: Any) -> dict:
        arrays.append(np.asarray(array))
        return {"array": len(arrays)}

    structure = json.dumps(state, default=number)
    np.savez(file, np.array(structure), *arrays)


def read(file: Any) -> dict:
    """Read what `write` has written.

    Args:
        file: The path, or the open file.

    Returns:
        The state.
    """
    with np.load(file) as content:
        return json.loads(
            str(content["arr_0"]),
            object_hook=lambda found: content[f"arr_{found['array']}"] if found.keys() == {"array"} else found,
        )


def with_numbered_ranks(saved: dict) -> dict:
    """Return a state of grace_ext.exchange.checkpoint that was read from a file with numbers as keys of its memories again.

    Args:
        saved: The state.

    Returns:
        The state.
    """
    return {**saved, "memories": {int(rank): memory for rank, memory in saved["memories"].items()}}


def gather_bytes(transport: Any, name: str, own: np.ndarray, to: int) -> list[np.ndarray]:
    """Gather every rank's bytes, however many, on one rank: a collective.

    Args:
        transport: An adapter's transport, which has `gather_to`.
        name: What the collectives' names begin with.
        own: uint8[m]; m may differ between ranks.
        to: The rank that gets them.

    Returns:
        uint8[m] of each rank, in the order of ranks, on rank `to`; elsewhere an empty list.
    """
    length = np.array([own.size], "<i8").view(np.uint8)
    lengths = transport.allgather(f"{name}.length", length).wait().copy().view("<i8")
    received: list[list[np.ndarray]] = [[] for _ in lengths]
    chunk = _CHUNK // transport.size
    for start in range(0, int(lengths.max()), chunk):
        parts = transport.gather_to(f"{name}.{start}", own[start : start + chunk], to)
        for pieces, part in zip(received, parts, strict=True) if parts else ():
            pieces.append(part)
    return [np.concatenate(pieces) for pieces in received if pieces]


def gather_memories(transport: Any, name: str, memory: dict, to: int) -> list[dict]:
    """Gather every rank's dict of arrays on one rank, for StateSession: a collective.

    Args:
        transport: See gather_bytes.
        name: See gather_bytes.
        memory: This rank's.
        to: The rank that gets them.

    Returns:
        The dict of each rank, in the order of ranks, on rank `to`; elsewhere an empty list.
    """
    file = io.BytesIO()
    write(file, memory)
    own = np.frombuffer(file.getbuffer(), np.uint8)
    return [read(io.BytesIO(one.tobytes())) for one in gather_bytes(transport, name, own, to)]

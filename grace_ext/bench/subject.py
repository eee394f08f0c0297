"""The gradient that is measured on, and the clock."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from .. import registry
from .._util.rng import Stream
from ..sparsifiers.base import Scope

AT_LEAST, PATIENCE = 3, 10.0  # a comparison ends after PATIENCE seconds, if it was repeated at least AT_LEAST times


@dataclasses.dataclass
class Candidate:
    """One of the functions that are compared.

    Attributes:
        run: The function; its time is measured.
        prepare: Called before each call of `run`; its time is not measured.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def time_in_turns(candidates: dict, repetitions: int, patience: float = PATIENCE) -> dict:
    """Time functions in turns. A first round is not counted.

    Args:
        candidates: Name -> candidate.
        repetitions: Number of rounds.
        patience: Seconds after which rounds end early, if there were at least AT_LEAST.

    Returns:
        Name -> seconds of each repetition.
    """
    seconds = {name: [] for name in candidates}
    end = time.perf_counter() + patience
    for done in range(-1, repetitions):
        if done >= AT_LEAST and time.perf_counter() > end:
            break
        for name, candidate in candidates.items():
            candidate.prepare()
            started = time.perf_counter()
            candidate.run()
            if done >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def warm_cache(*arrays):
    """Make a function that reads arrays, so that they are in the caches, as after the stage before.

    Args:
        *arrays: The arrays.

    Returns:
        The function.
    """
    return lambda: [array.view(np.uint8).max(initial=0) for array in arrays]


class Subject:
    """One gradient to measure on.

    Args:
        gradient: float32[d].
        repetitions: Number of repetitions of each measurement.
        peers: Whether to measure other libraries for comparison.
    """

    def __init__(self, gradient: np.ndarray, repetitions: int, peers: bool):
        self.gradient = gradient
        self.d = gradient.size
        self.repetitions = repetitions
        self.peers = peers
        self.stream = Stream(name="bench")
        self.scope = Scope(self.stream, (self.d,))
        self._copy = np.empty_like(gradient)
        self._memcpy: list[float] = []

    def memcpy_seconds(self) -> dict:
        """Return the seconds that one memcpy of the gradient took.

        Returns:
            The keys "median" and "minimum".
        """
        return {"median": float(np.median(self._memcpy)), "minimum": min(self._memcpy)}

    def compare(self, candidates: dict, patience: float = PATIENCE) -> dict:
        """Time functions in turns with a memcpy of the gradient.

        Args:
            candidates: Name -> candidate.
            patience: Seconds after which rounds end early, if there were at least AT_LEAST.

        Returns:
            Name -> "seconds" and "memcpy" (multiples of the memcpy of the same rounds), each with "median" and "minimum",
            and "repetitions".
        """
        memcpy = Candidate(lambda: np.copyto(self._copy, self.gradient))
        seconds = time_in_turns({"memcpy": memcpy, **candidates}, self.repetitions, patience)
        reference = seconds.pop("memcpy")
        self._memcpy += reference
        return {
            name: {
                "seconds": {"median": float(np.median(taken)), "minimum": min(taken)},
                "memcpy": {"median": float(np.median(taken) / np.median(reference)), "minimum": min(taken) / min(reference)},
                "repetitions": len(taken),
            }
            for name, taken in seconds.items()
        }

    def support(self, density: float) -> tuple[np.ndarray, np.ndarray]:
        """Select the top-k of the gradient.

        Args:
            density: Share of the elements to select.

        Returns:
            Positions and values, as copies.
        """
        indices, values = registry.build("sparsifier", "topk", {"density": density}).select(self.gradient, self.scope)
        return indices.copy(), values.copy()


def with_times(rows: list[dict], times: dict, count: str | None = "k") -> list[dict]:
    """Add times to rows, under "encode" and "decode".

    Args:
        rows: The rows; "decode_scale" in a row is what its decoding time is multiplied by.
        times: (row["stage"], "encode" or "decode") -> times, from `Subject.compare`.
        count: Key of the row's number of elements, for elements per second; None: no such figure.

    Returns:
        The rows.
    """
    for row in rows:
        for what in ("encode", "decode"):
            row[what] = times[row["stage"], what]
            scale = row.get("decode_scale", 1) if what == "decode" else 1
            for unit in ("seconds", "memcpy"):
                row[what][unit] = {which: scale * figure for which, figure in row[what][unit].items()}
            if count:
                row[what]["per_second"] = row[count] / row[what]["seconds"]["median"]
    return rows


def relative_error(values: np.ndarray, decoded: np.ndarray) -> float:
    """Compute the 2-norm of the difference over that of the values.

    Args:
        values: float32[k].
        decoded: float32[k].

    Returns:
        The relative error; 0 if the values are all 0.
    """
    exact = values.astype(np.float64)
    norm = np.linalg.norm(exact)
    return float(np.linalg.norm(exact - decoded) / norm) if norm else 0.0

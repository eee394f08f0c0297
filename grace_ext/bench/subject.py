"""The gradient that is measured on, and the clock."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from .. import registry
from .._util.rng import Stream
from ..sparsifiers.base import Scope

AT_LEAST, PATIENCE = 3, 10.0  # after so many seconds a comparison ends, if it has been repeated so often


@dataclasses.dataclass
class Contestant:
    """prepare() runs before each run(), outside the clock."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def race(contestants: dict, repetitions: int, patience: float = PATIENCE) -> dict:
    """Seconds of every repetition by name. The contestants take turns; a first round is not counted."""
    seconds = {name: [] for name in contestants}
    end = time.perf_counter() + patience
    for done in range(-1, repetitions):
        if done >= AT_LEAST and time.perf_counter() > end:
            break
        for name, contestant in contestants.items():
            contestant.prepare()
            started = time.perf_counter()
            contestant.run()
            if done >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def touch(*arrays):
    """Brings arrays into the caches, where the stage before leaves them."""
    return lambda: [array.view(np.uint8).max(initial=0) for array in arrays]


class Subject:
    """One gradient. peers: whether libraries are measured beside our own parts."""

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
        return {"median": float(np.median(self._memcpy)), "minimum": min(self._memcpy)}

    def race(self, contestants: dict, patience: float = PATIENCE) -> dict:
        """Times by name, each as a multiple of the memcpy of the same rounds."""
        memcpy = Contestant(lambda: np.copyto(self._copy, self.gradient))
        seconds = race({"memcpy": memcpy, **contestants}, self.repetitions, patience)
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
        """Positions and values of the top-k of the gradient; copies."""
        indices, values = registry.build("sparsifier", "topk", {"density": density}).select(self.gradient, self.scope)
        return indices.copy(), values.copy()


def with_times(rows: list[dict], times: dict, count: str | None = "k") -> list[dict]:
    """Give each row its times, found under (row["stage"], "encode" or "decode"), and how many of row[count] a second.
    decode_scale: what decoding was measured on a part of."""
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
    """The 2-norm of the difference over that of the values; float32[k] each."""
    exact = values.astype(np.float64)
    norm = np.linalg.norm(exact)
    return float(np.linalg.norm(exact - decoded) / norm) if norm else 0.0

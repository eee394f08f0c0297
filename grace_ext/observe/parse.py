"""What users write for `observe=` and `capture=`."""

import os
import warnings

from ..errors import ConfigError
from .base import Observer
from .capture import Capture
from .files import CsvWriter, JsonlWriter
from .tensorboard import TensorBoardWriter


def observers(observe) -> list[Observer]:
    """None, a path, an Observer, or a list of these -> Observers.

    A path that ends in .jsonl gives a JsonlWriter, one in .csv a CsvWriter; any other is a folder for a
    TensorBoardWriter. Raises ConfigError for what is none of these, and for .json.
    """
    if observe is None:
        return []
    if isinstance(observe, list | tuple):
        return [observer for one in observe for observer in observers(one)]
    if isinstance(observe, Observer):
        return [observe]
    if not isinstance(observe, str | os.PathLike):
        raise ConfigError(f"observe={observe!r}; allowed: a path, an observer of grace_ext.observe, or a list of these")
    ending = os.path.splitext(observe)[1]
    if ending == ".jsonl":
        return [JsonlWriter(observe)]
    if ending == ".csv":
        return [CsvWriter(observe)]
    if ending == ".json":
        raise ConfigError(
            f"observe={os.fspath(observe)!r}: for records, a line each, let it end in .jsonl; for a timeline "
            f"write grace_ext.observe.Timeline({os.fspath(observe)!r})"
        )
    return [TensorBoardWriter(observe)]


def parse_observers(capture, observe) -> tuple[Capture | None, list[Observer]]:
    """What the adapters' arguments of these names stand for. capture: a folder, a Capture or None. Raises ConfigError."""
    return capture if isinstance(capture, Capture | None) else Capture(capture), observers(observe)


def warn_of_one_rank(capture: Capture | None, observe: list[Observer], stacklevel: int) -> None:
    """Call it where there are no others to exchange gradients with. stacklevel: of warnings.warn, seen from the caller."""
    if capture or observe:
        warnings.warn(
            "capture, observe: there is one rank, so gradients are not compressed and there is nothing to see",
            stacklevel=stacklevel + 1,
        )

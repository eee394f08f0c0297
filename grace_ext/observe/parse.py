"""The values of the arguments `observe=` and `capture=`."""

import os
import warnings

from ..errors import ConfigError
from .base import Observer
from .capture import Capture
from .files import CsvWriter, JsonlWriter
from .tensorboard import TensorBoardWriter

#: What an argument `observe=` may be; a list or tuple holds such values.
Observe = str | os.PathLike | Observer | list | tuple | None


def observers(observe: Observe) -> list[Observer]:
    """Make observers from an argument `observe=`.

    Args:
        observe: None, a path, an Observer, or a list of these. A path that ends in .jsonl gives a JsonlWriter, one in .csv a
            CsvWriter; any other is a folder for a TensorBoardWriter.

    Returns:
        The observers, in order.

    Raises:
        ConfigError: The argument is none of these, or a path that ends in .json.
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


def parse_observers(capture: Capture | str | os.PathLike | None, observe: Observe) -> tuple[Capture | None, list[Observer]]:
    """Make what the adapters' arguments of these names stand for. Raises ConfigError as `observers` does.

    Args:
        capture: A folder, a Capture or None.
        observe: See `observers`.

    Returns:
        The Capture, or None, and the observers.
    """
    return capture if isinstance(capture, Capture | None) else Capture(capture), observers(observe)


def warn_of_one_rank(capture: Capture | None, observe: list[Observer], stacklevel: int) -> None:
    """Warn that there is nothing to see, because there are no other ranks to exchange gradients with.

    Args:
        capture: The Capture that the user asked for.
        observe: The observers that the user asked for.
        stacklevel: The stacklevel of warnings.warn, as seen from the caller.
    """
    if capture or observe:
        warnings.warn(
            "capture, observe: there is one rank, so gradients are not compressed and there is nothing to see",
            stacklevel=stacklevel + 1,
        )

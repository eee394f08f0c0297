"""The base classes of observers."""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError

_LOG = logging.getLogger("grace_ext")


def warn(text: str) -> None:
    """Warn of something that must not disturb the training.

    Where a filter turns the warning into an error, it is written to the log "grace_ext" instead: other ranks would wait for
    the one that raises it.

    Args:
        text: The warning.
    """
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        _LOG.warning("%s", text)


class Observer:
    """Writes to a path. An error is one warning, and ends this observer.

    Args:
        path: Where to write. "{rank}" in it stands for the rank, and makes every rank write; without it rank 0 does.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self.every_rank = "{rank}" in self.path
        self.ended = False

    def path_of(self, rank: int) -> str:
        """Make the folder of a rank's path.

        Args:
            rank: Number of the rank.

        Returns:
            The path.
        """
        path = self.path.replace("{rank}", str(rank))
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return path

    def attempt(self, work: Callable, *args: Any) -> None:
        """Call a function unless an error ended this observer.

        Args:
            work: The function; an error that it raises ends the observer.
            *args: Its arguments.
        """
        if self.ended:
            return
        try:
            work(*args)
        except Exception as error:
            # Any error, be it a full disk or a bug in a library: the other ranks are waiting for this one.
            self.ended = True
            warn(f"observing the compression in {self.path} ends: {type(error).__name__}: {error}")


class Writer(Observer):
    """Gets a record of every `every`-th step, and with it the norms of that step, which cost a pass over each gradient.

    A record: {"step", "time": seconds since the epoch, "rank", "finite": whether all ranks' gradients were, "bytes_in",
    "bytes_out", "ratio", "compressed", "seconds", "late_seconds", "exposed_seconds", "index_codecs": as in Exchange.stats,
    of this step; "lag": the energy of this rank's residuals over that of its gradients, which is the number of steps that
    wait where gradients are mostly noise, or None; "residual_norm_ratio": {tensor name: ||residual|| / ||gradient||, L2,
    None where that is no number}}. The residual is what the step began with, the gradient this rank's own.

    Args:
        path: See Observer.
        every: Number of steps from one record to the next.

    Raises:
        ConfigError: `every` is not a whole number from 1 on.
    """

    def __init__(self, path: str | os.PathLike, every: int = 10):
        super().__init__(path)
        if not isinstance(every, int) or every < 1:
            raise ConfigError(f"{type(self).__name__}: every={every!r}; allowed: whole numbers from 1")
        self.every = every

    def write(self, record: dict) -> None:
        """Write a record. An error ends the writer; see Observer.

        Args:
            record: The record of a step.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Write all records to the file. Records that come later are appended."""


def flatten(record: dict, prefix: str = "") -> dict:
    """Flatten a record: {"seconds": {"select": 0.1}} becomes {"seconds/select": 0.1}.

    Args:
        record: A record, with dicts in it.
        prefix: What each key begins with.

    Returns:
        The record without dicts in it.
    """
    found = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found.update(flatten(value, f"{prefix}{key}/"))
        else:
            found[prefix + key] = value
    return found

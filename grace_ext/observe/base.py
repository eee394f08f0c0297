"""What watches an exchange from outside."""

import os
import warnings

from ..errors import ConfigError


class Observer:
    """Writes to a path. What goes wrong with that is one warning, and ends this observer.

    path: "{rank}" in it stands for the rank, and makes every rank write; otherwise rank 0 does.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        self.every_rank = "{rank}" in self.path
        self.ended = False

    def path_of(self, rank: int) -> str:
        """The path, with its folder made."""
        path = self.path.replace("{rank}", str(rank))
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return path

    def attempt(self, work, *args) -> None:
        """Call work(*args) unless something went wrong before."""
        if self.ended:
            return
        try:
            work(*args)
        except Exception as error:  # a full disk as much as a bug in a library: the other ranks are waiting for this one
            self.ended = True
            warnings.warn(f"observing the compression in {self.path} ends: {type(error).__name__}: {error}", stacklevel=2)


class Writer(Observer):
    """Gets a record of every `every`-th step, and with it the norms of that step, which cost a look at each gradient.

    A record: {"step", "time": seconds since the epoch, "rank", "finite": whether all ranks' gradients were, "bytes_in",
    "bytes_out", "ratio", "compressed", "seconds", "index_codecs": as in Exchange.stats, of this step;
    "residual_norm_ratio": {tensor name: ||residual|| / ||gradient||, L2, None where that is no number}}. The residual is
    what the step began with, the gradient this rank's own.
    """

    def __init__(self, path, every: int = 10):
        super().__init__(path)
        if not isinstance(every, int) or every < 1:
            raise ConfigError(f"{type(self).__name__}: every={every!r}; allowed: whole numbers from 1")
        self.every = every

    def write(self, record: dict) -> None:
        """Errors end the writer: see Observer."""
        raise NotImplementedError

    def close(self) -> None:
        """Have all records in the file. What is written later goes on from there."""


def flat(record: dict, prefix: str = "") -> dict:
    """{"seconds": {"select": 0.1}} -> {"seconds/select": 0.1}"""
    found = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{key}/"))
        else:
            found[prefix + key] = value
    return found

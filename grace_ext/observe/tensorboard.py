"""Records as scalars of TensorBoard.

They are written by the first library that is installed: tensorboardX, PyTorch's own writer (which needs the package
tensorboard), or TensorFlow.
"""

import atexit
import importlib.util
import os
from typing import Any

from ..errors import ConfigError
from .base import Writer, flatten

_LEFT_OUT = {"step", "time", "rank"}
_FLUSH_SECONDS = 10


class TensorBoardWriter(Writer):
    """Writes scalars to a folder.

    Their names are compression/ratio, compression/seconds/select, compression/residual_norm_ratio/conv1.weight, ... They are
    in the file ten seconds later, and all of them when the program ends.

    Args:
        path: The folder; see Observer.
        every: See Writer.

    Raises:
        ConfigError: None of the libraries is installed.
    """

    def __init__(self, path: str | os.PathLike, every: int = 10):
        super().__init__(path, every)
        self._make = _library()
        self._writer = None

    def write(self, record: dict) -> None:
        if self._writer is None:
            self._writer = self._make(self.path_of(record["rank"]), flush_secs=_FLUSH_SECONDS)
            atexit.register(self.close)  # because the libraries write in threads of their own
        for name, value in flatten(record).items():
            if name not in _LEFT_OUT and value is not None:
                self._writer.add_scalar(f"compression/{name}", float(value), record["step"], record["time"])  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _library() -> Any:
    """Return what makes a writer from a folder."""
    if _installed("tensorboardX"):
        from tensorboardX import SummaryWriter

        return SummaryWriter
    if _installed("torch") and _installed("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter
    if _installed("tensorflow"):
        return _TensorFlowWriter
    raise ConfigError("writing for TensorBoard needs a library: pip install tensorboardX (or tensorboard, beside PyTorch)")


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class _TensorFlowWriter:
    """Writes events with TensorFlow 1's writer, which needs neither eager execution nor the package tensorboard."""

    def __init__(self, folder: str, flush_secs: int):
        import tensorflow as tf

        self._v1 = tf.compat.v1
        with tf.Graph().as_default():  # it cannot be made in eager mode
            self._writer = self._v1.summary.FileWriter(folder, flush_secs=flush_secs)

    def add_scalar(self, tag: str, value: float, step: int, time: float) -> None:
        summary = self._v1.Summary(value=[self._v1.Summary.Value(tag=tag, simple_value=value)])
        self._writer.add_event(self._v1.Event(wall_time=time, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()

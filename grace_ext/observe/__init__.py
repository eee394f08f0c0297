"""Observers of a training run: records in files, timelines beside Horovod's, and warnings.

`observe=` of the adapters takes what `observers` takes. No observer changes a result, and no error of a file disturbs the
training.
"""

from .base import Observer, Writer
from .capture import Capture
from .files import CsvWriter, JsonlWriter
from .parse import observers, parse_observers, warn_of_one_rank
from .tensorboard import TensorBoardWriter
from .timeline import Timeline, merge_timelines

__all__ = [
    "Capture",
    "CsvWriter",
    "JsonlWriter",
    "Observer",
    "TensorBoardWriter",
    "Timeline",
    "Writer",
    "merge_timelines",
    "observers",
    "parse_observers",
    "warn_of_one_rank",
]

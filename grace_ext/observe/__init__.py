"""What a training run says of its compression: written to files, drawn beside Horovod's timeline, and warned of.

`observe=` of the adapters takes what `observers` takes. None of it changes a result, and no file disturbs the training.
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

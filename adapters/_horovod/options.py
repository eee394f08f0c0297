"""What Horovod's arguments mean, the same in every adapter over Horovod."""

import collections
import dataclasses
import itertools
from types import ModuleType
from typing import ClassVar

import numpy as np

from grace_ext import ConfigError

from .._common.options import CompressionOptions

_made: dict[tuple, itertools.count] = collections.defaultdict(itertools.count)  # by the ranks of a process set


@dataclasses.dataclass
class HorovodOptions(CompressionOptions):
    """The shared options, and those of Horovod's own wrappers. A subclass for each framework says what `hvd` is."""

    op: object = None
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    sparse_as_dense: bool = False
    process_set: object = None
    backward_passes_per_step: int = 1

    #: horovod.torch or horovod.tensorflow.
    hvd: ClassVar[ModuleType]

    def __post_init__(self):
        super().__post_init__()
        if self.op not in (self.hvd.Average, self.hvd.Sum):
            raise ConfigError("op: only hvd.Average and hvd.Sum can be compressed; use Horovod's own for Adasum")
        if self.gradient_predivide_factor != 1.0 and self.op != self.hvd.Average:
            raise ConfigError("gradient_predivide_factor works with op=hvd.Average only")
        if self.backward_passes_per_step < 1:
            raise ConfigError(f"backward_passes_per_step={self.backward_passes_per_step}; allowed: 1 and more")
        self.groups = self.num_groups or self.groups
        for horovods, own in ((self.hvd.Compression.none, "dense/raw"), (self.hvd.Compression.fp16, "dense/fp16")):
            if self.compression is horovods:
                self.compression, self.memory, self.communicator = own, "none", "allreduce"

    @property
    def prescale(self) -> float:
        """What gradients are multiplied with before the sum over ranks."""
        return 1.0 / self.gradient_predivide_factor

    def make_exchange(self, transport, **options):
        factor, ranks = self.gradient_predivide_factor, self.process_set.size()
        return super().make_exchange(transport, factor / ranks if self.op == self.hvd.Average else 1.0, **options)


def prefix_of(process_set) -> str:
    """What the names of one more exchange's collectives in that process set begin with.

    The same on all its ranks if these make their exchanges in it in the same order. So it depends on nothing that some of
    them do in other sets: a set is known by its ranks, since Horovod gives the number of one that was removed to another,
    and the global one by its number, since elastic Horovod changes its ranks. Raises ConfigError for a set that Horovod does
    not know.
    """
    if process_set.process_set_id is None:
        raise ConfigError(f"{process_set} is not initialized, or was removed: pass it to hvd.init() or add_process_set()")
    if process_set.process_set_id == 0:
        return f"grace_ext.{next(_made[()])}"
    return f"grace_ext.set{process_set.process_set_id}.{next(_made[tuple(process_set.ranks)])}"


def group_names(groups, names: dict[int, str]) -> list[list[str]] | None:
    """Horovod's `groups` (lists of parameters, or a number of groups) as lists of names. names: by id of the parameter, in
    the order of the model. Raises ConfigError for anything else."""
    if groups is None or groups == 0:
        return None
    if isinstance(groups, int) and groups > 0:
        return [list(part) for part in np.array_split(list(names.values()), min(groups, len(names)))]
    if not isinstance(groups, list):
        raise ConfigError(f"groups is a positive number or a list of lists of parameters, not {groups!r}")
    found = [[names[id(p)] for p in group if id(p) in names] for group in groups]
    flat = [name for group in found for name in group]
    if len(set(flat)) < len(flat):
        raise ConfigError("groups: a parameter can only appear once")
    return found

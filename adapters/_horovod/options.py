"""What Horovod's arguments mean, the same in every adapter over Horovod. hvd: the adapter's horovod.torch or .tensorflow."""

import collections
import itertools

import numpy as np

from grace_ext import ConfigError

_made: dict[tuple, itertools.count] = collections.defaultdict(itertools.count)  # by the ranks of a process set


def check_reduction(hvd, op, gradient_predivide_factor: float) -> None:
    """Raises ConfigError for reductions that are not an average or a sum."""
    if op not in (hvd.Average, hvd.Sum):
        raise ConfigError("op: only hvd.Average and hvd.Sum can be compressed; use Horovod's own for Adasum")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ConfigError("gradient_predivide_factor works with op=hvd.Average only")


def weight_of(hvd, op, gradient_predivide_factor: float, ranks: int) -> float:
    """What the sum over ranks is multiplied with."""
    return gradient_predivide_factor / ranks if op == hvd.Average else 1.0


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


def understand_compression(hvd, compression, memory, communicator) -> tuple:
    """(compression, memory, communicator), where compression may be one of Horovod's: dense gradients by allreduce, without
    a memory."""
    if compression is hvd.Compression.none:
        return "dense/raw", "none", "allreduce"
    if compression is hvd.Compression.fp16:
        return "dense/fp16", "none", "allreduce"
    return compression, memory, communicator


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

"""Which ranks of Horovod's make rounds of local steps."""

from typing import Any

from grace_ext import ConfigError
from grace_ext.exchange.stalls import is_elastic

from .exits import guard_exit
from .options import prefix_of


def ranks_of(hvd: Any, process_set: Any, follows_changes: bool = False) -> tuple[Any, str]:
    """The process set, None standing for all ranks, and what the names of its rounds' collectives begin with.

    hvd: horovod.torch or horovod.tensorflow, or None where neither is imported. follows_changes: whether the caller can go on with
    other ranks. Raises ConfigError where no rounds are possible.
    """
    if hvd is None or not hvd.is_initialized():
        raise ConfigError("Horovod is not initialized: call init() of horovod.torch or horovod.tensorflow first")
    process_set = process_set or hvd.global_process_set
    if is_elastic() and not (follows_changes and process_set.process_set_id == 0):
        raise ConfigError(
            "elastic Horovod changes the ranks during a job; allowed with it: LocalSteps for PyTorch, with all ranks"
        )
    if not process_set.included():
        raise ConfigError(f"this rank does not belong to {process_set}")
    guard_exit(hvd)
    return process_set, f"{prefix_of(process_set)}.rounds"

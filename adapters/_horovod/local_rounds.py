"""Which ranks of Horovod's make rounds of local steps."""

import os
from typing import Any

from grace_ext import ConfigError

from .exits import guard_exit
from .options import prefix_of


def ranks_of(hvd: Any, process_set: Any) -> tuple[Any, str]:
    """The process set, None standing for all ranks, and what the names of its rounds' collectives begin with.

    hvd: horovod.torch or horovod.tensorflow, or None where neither is imported. Raises ConfigError where no rounds are possible.
    """
    if hvd is None or not hvd.is_initialized():
        raise ConfigError("Horovod is not initialized: call init() of horovod.torch or horovod.tensorflow first")
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ConfigError("elastic Horovod changes the ranks during a job, which local steps do not support")
    process_set = process_set or hvd.global_process_set
    if not process_set.included():
        raise ConfigError(f"this rank does not belong to {process_set}")
    guard_exit(hvd)
    return process_set, f"{prefix_of(process_set)}.rounds"

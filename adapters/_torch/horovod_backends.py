"""What carries the containers of Horovod's ranks: Horovod's own collectives, or a group of Gloo beside them."""

import logging
import time

import horovod.torch as hvd
import numpy as np
import torch

from grace_ext import ConfigError
from grace_ext.exchange.stalls import is_elastic
from grace_ext.transport import Transport

from .gloo_transport import GlooTransport
from .hvd_transport import HorovodTransport

log = logging.getLogger("grace_ext")
#: Seconds of one of Horovod's collectives from which on, where the user leaves it open, a group of Gloo takes its place.
SLOW = 0.02
_PROBES = 5
_ALLOWED = "None, 'horovod' for Horovod's MPI or Gloo, 'gloo' for PyTorch's Gloo beside it, or 'nccl' for Horovod's NCCL"


def make_transport(process_set: hvd.ProcessSet, backend: str | None, prefix: str) -> Transport:
    """Make the transport of a process set. A collective if `backend` is None, but not under elastic Horovod.

    Args:
        process_set: The process set.
        backend: "horovod" for Horovod's MPI or Gloo, with messages on the host; "gloo" for a group of PyTorch's Gloo; "nccl" for
            Horovod's NCCL, with messages on this rank's current GPU; None for "gloo" if one of Horovod's collectives takes SLOW
            or longer, else "horovod".
        prefix: What the names of the transport's own collectives begin with.

    Returns:
        The transport.

    Raises:
        ConfigError: There is no such backend here.
    """
    if backend is None:
        return _chosen(process_set, prefix)
    if backend == "horovod":
        return HorovodTransport(process_set)
    if backend == "gloo":
        if not _has_gloo():
            raise ConfigError("backend='gloo': this PyTorch was built without Gloo; allowed: None or 'horovod'")
        if is_elastic():
            raise ConfigError("backend='gloo': with it, elastic Horovod would not go on without a lost host; allowed: None")
        return GlooTransport(process_set, prefix)
    if backend != "nccl":
        raise ConfigError(f"backend={backend!r}; allowed: {_ALLOWED}")
    if not hvd.nccl_built():
        raise ConfigError("backend='nccl': Horovod was built without NCCL (see horovodrun --check-build); allowed: None")
    if not torch.cuda.is_available():
        raise ConfigError("backend='nccl': this rank has no GPU; allowed: None")
    return HorovodTransport(process_set, torch.device("cuda", torch.cuda.current_device()))


def _has_gloo() -> bool:
    return torch.distributed.is_available() and hasattr(torch.distributed, "ProcessGroupGloo")


def _chosen(process_set: hvd.ProcessSet, prefix: str) -> Transport:
    """The transport where the user leaves it open."""
    plain = HorovodTransport(process_set)
    if is_elastic() or not _has_gloo() or (seconds := _seconds_of_a_collective(plain, f"{prefix}.latency")) < SLOW:
        return plain
    beside, failed = GlooTransport(process_set, prefix), b""
    try:
        beside.connect()
    except Exception as error:
        failed = f"rank {plain.rank}: {error}; ".encode()
    said = plain.allgather(f"{prefix}.gloo.failed", np.frombuffer(failed, np.uint8)).wait().tobytes().decode()
    if plain.rank == 0:
        slow = f"a collective of Horovod takes {1000 * seconds:.0f} ms here"
        if said:
            log.warning("%s, and a group of Gloo, which would take less, could not be made: %s", slow, said)
        else:
            log.info("%s: containers go by a group of Gloo beside it; backend='horovod' prevents that", slow)
    return plain if said else beside


def _seconds_of_a_collective(transport: HorovodTransport, name: str) -> float:
    """The shortest of some collectives of a few bytes, the same number on all ranks."""
    least = np.full(1, np.inf)
    for probe in range(_PROBES + 1):
        began = time.perf_counter()
        transport.allgather(name, np.zeros(1, np.uint8)).wait()
        if probe:  # in the first, ranks wait for each other
            least = np.minimum(least, time.perf_counter() - began)
    return float(transport.allgather(f"{name}.agreed", least.view(np.uint8)).wait().copy().view(np.float64).max())

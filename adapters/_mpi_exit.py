"""No rank is left hanging when one fails.

A rank that ends with an exception waits in MPI_Finalize for the others, which wait for its messages. `python -m mpi4py`
ends the job instead; so does this, without it, as Python exits: the traceback has been printed by then.
"""

import atexit
import logging
import sys

from mpi4py import MPI
from mpi4py.run import set_abort_status

_LOG = logging.getLogger("grace_ext")
_open: dict[object, str] = {}  # servers and clients that others rely on, and when they do


def begin(part: object, when: str) -> None:
    """Others rely on this server or client from here on."""
    _open[part] = when


def end(part: object) -> None:
    _open.pop(part, None)


def _end_all_ranks() -> None:
    """After an exception that nobody caught, or if others still rely on this rank."""
    if MPI.COMM_WORLD.size == 1:
        return
    failed = getattr(sys, "last_value", None) is not None  # set by the interpreter with the traceback
    if not failed and _open:
        _LOG.error("federated: rank %d ends %s: all ranks are ended", MPI.COMM_WORLD.rank,
                   " and ".join(sorted(set(_open.values()))))
    if failed or _open:
        set_abort_status(1)


atexit.register(_end_all_ranks)  # mpi4py looks at the status later, as it finalizes MPI

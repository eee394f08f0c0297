"""No rank is left hanging when one fails.

A rank that ends with an exception waits in MPI_Finalize for the others, which wait for its messages. `python -m mpi4py`
ends the job instead; so does this, without it, as Python exits: the traceback has been printed by then. A server also ends
the job if clients neither answer its stop message nor reach MPI_Finalize.
"""

import atexit
import faulthandler
import logging
import sys

from mpi4py import MPI
from mpi4py.run import set_abort_status

_LOG = logging.getLogger("grace_ext")
PATIENCE = 30.0  # seconds for clients that were told to end, and did not answer
_open: dict[object, str] = {}  # servers and clients that others rely on, and when they do
_silent: set[int] = set()  # ranks that may never come to MPI_Finalize


def begin(part: object, when: str) -> None:
    """Others rely on this server or client from here on, or on this rank, which cannot go on."""
    _open[part] = when


def end(part: object, silent=()) -> None:
    """silent: ranks that did not answer."""
    _open.pop(part, None)
    _silent.update(silent)


def _end_all_ranks() -> None:
    """After an exception that nobody caught, or if others still rely on this rank."""
    if MPI.COMM_WORLD.size == 1:
        return
    failed = getattr(sys, "last_value", None) is not None  # set by the interpreter with the traceback
    if not failed and _open:
        _LOG.error("rank %d ends %s: all ranks are ended", MPI.COMM_WORLD.rank, " and ".join(sorted(set(_open.values()))))
    if failed or _open:
        set_abort_status(1)
    elif _silent:
        _LOG.error(
            f"federated: ranks {sorted(_silent)} did not answer; if they do not end within {PATIENCE:g} s, the job ends "
            f"without them"
        )
        # A thread of C, because MPI_Finalize keeps the interpreter lock. Finalize here, because a hang in mpi4py's own call at
        # exit would go unnoticed.
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.__stderr__)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()


atexit.register(_end_all_ranks)  # mpi4py looks at the status later, as it finalizes MPI

"""No rank is left hanging when one fails.

A rank that ends with an exception runs Horovod's shutdown at exit, which waits for the other ranks' background threads.
One of those can be stuck for good: it takes Horovod's table of process sets, then wants Python's interpreter lock to free
a tensor, while another thread of that rank holds the interpreter lock and waits for the table (seen with Horovod 0.28.1
and torch 2.13; tensors of our own do not need that lock, see _hold in _torch/hvd_transport.py). The failed rank would then wait for ever,
and the launcher, which ends the job when a rank exits, too.
"""

import atexit
import faulthandler
import sys

from grace_ext.exchange import stalls

GRACE_SECONDS = 10


class Watched:
    """A function of Horovod's library without arguments; under_way: how many calls there are now."""

    def __init__(self, plain):
        self.plain, self.under_way = plain, 0

    def __call__(self):
        self.under_way += 1
        try:
            return self.plain()
        finally:
            self.under_way -= 1


_shutdowns: list[Watched] = []  # one for each framework


def guard_exit(hvd) -> None:
    """After an uncaught exception give Horovod's shutdown GRACE_SECONDS, then end this process with an error. And from here
    on `shuts_down` tells of shutdowns.

    hvd: horovod.torch or horovod.tensorflow. Call after every hvd.init(): functions registered later run earlier at exit.
    Exceptions that somebody catches, as those from which elastic Horovod recovers, do not count. The watchdog is a thread of
    C that needs no interpreter lock; it also prints where each Python thread stands. More than one rank look after each other also
    while their Python cannot run.
    """
    atexit.unregister(_watch_failed_exit)
    atexit.register(_watch_failed_exit)
    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES
    if not isinstance(library.horovod_shutdown, Watched):
        library.horovod_shutdown = Watched(library.horovod_shutdown)
        _shutdowns.append(library.horovod_shutdown)
    if hvd.size() > 1:
        stalls.start_guard()


def shuts_down() -> bool:
    """Whether a thread is in hvd.shutdown(). (A look at all threads' frames would say it, too, but sys._current_frames of
    Python 3.11 can hang the process for good: CPython's issue 106883.)"""
    return any(shutdown.under_way for shutdown in _shutdowns)


stalls.shutdown_checks.append(shuts_down)


def _watch_failed_exit() -> None:
    if getattr(sys, "last_value", None) is not None:  # set by the interpreter for an exception that nobody caught
        faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True, file=sys.__stderr__)

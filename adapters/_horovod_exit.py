"""No rank is left hanging when one fails.

A rank that ends with an exception runs Horovod's shutdown at exit, which waits for the other ranks' background threads.
One of those can be stuck for good: it takes Horovod's table of process sets, then wants Python's interpreter lock to free
a tensor, while another thread of that rank holds the interpreter lock and waits for the table (seen with Horovod 0.28.1
and torch 2.13; tensors of our own do not need that lock, see horovod_torch._hold). The failed rank would then wait for ever,
and the launcher, which ends the job when a rank exits, too.
"""

import atexit
import faulthandler
import sys

GRACE_SECONDS = 10


def guard_exit() -> None:
    """After an uncaught exception give Horovod's shutdown GRACE_SECONDS, then end this process with an error.

    Call after every hvd.init(): functions registered later run earlier at exit. Exceptions that somebody catches, as those
    from which elastic Horovod recovers, do not count. The watchdog is a thread of C that needs no interpreter lock; it also
    prints where each Python thread stands.
    """
    atexit.unregister(_watch_failed_exit)
    atexit.register(_watch_failed_exit)


def _watch_failed_exit() -> None:
    if getattr(sys, "last_value", None) is not None:  # set by the interpreter for an exception that nobody caught
        faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True, file=sys.__stderr__)

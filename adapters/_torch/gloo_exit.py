"""Waits for PyTorch's Gloo threads when Python ends.

A thread of Gloo wakes those who wait for a collective before it drops its own references to the tensors, and dropping them
takes Python's interpreter lock. If the machine is so busy that the thread gets no processor time in between, and Python
ends, the process aborts with "terminate called without an active exception" although it has done its work
(pytorch/pytorch#190489). destroy_process_group() does not wait for these threads either.
"""

import atexit
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_SECONDS = 10.0  # ranks that never get the processor again should end nevertheless
_NAP = 0.002  # without the interpreter lock


def _busy() -> bool:
    """Whether a thread of Gloo runs, or would run if it had a processor. One that waits in a collective sleeps."""
    for thread in _THREADS.iterdir():
        try:
            name, fields = (thread / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:  # it has ended
            continue
        if name == "pt_gloo_runloop" and fields.split()[0] == "R":
            return True
    return False


def _wait() -> None:
    """Returns when no thread of Gloo has run in three looks, or after 10 seconds."""
    end = time.monotonic() + _SECONDS
    quiet = 0
    while quiet < 3 and time.monotonic() < end:
        time.sleep(_NAP)
        quiet = 0 if _busy() else quiet + 1


def wait_at_exit() -> None:
    """Lets Python wait for Gloo's threads before it ends. May be called several times."""
    if _THREADS.exists():
        atexit.unregister(_wait)
        atexit.register(_wait)

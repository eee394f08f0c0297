"""How a thread waits for a collective of Horovod or MPI without taking the core from the codecs and from other ranks."""

import functools
import os
import time
from collections.abc import Callable

from grace_ext._util.cores import host_cores

_AWAKE = 5e-3  # seconds of waiting for a collective before the first nap
_NAP, _SHORTEST, _LONGEST = 0.1, 5e-5, 1e-3  # the next nap's share of the wait so far, and its bounds in seconds
_INTERVAL, _CROWDED = 1.0, 0.2  # seconds between two measurements, and the share of its time that a thread waits for a core


class CoreContention:
    """Whether others want this rank's core: other ranks, other programs, or other containers, which may be hosts of this job.

    Linux tells how long the rank's main thread had to wait for a core; what counts is the last second or so.

    Args:
        oversubscribed: Whether this host has more ranks than cores. Then cores are always contended.
    """

    def __init__(self, oversubscribed: bool):
        self._oversubscribed = oversubscribed
        self._crowded, self._measured, self._before = oversubscribed, time.monotonic(), self._now()

    def is_crowded(self) -> bool:
        if (now := time.monotonic()) - self._measured > _INTERVAL:
            after, self._measured = self._now(), now
            ran, waited = after[0] - self._before[0], after[1] - self._before[1]
            self._before, self._crowded = after, self._oversubscribed or waited > _CROWDED * (ran + waited)
        return self._crowded

    @staticmethod
    def _now() -> tuple[int, int]:
        """Nanoseconds that the main thread has run so far, and those in which it was ready to run but had no core."""
        try:
            with open("/proc/self/schedstat", encoding="ascii") as file:
                ran, waited, _ = file.read().split()
        except OSError:  # a kernel without it
            return 0, 0
        return int(ran), int(waited)


@functools.cache
def _contention(ranks_here: int) -> CoreContention:
    return CoreContention(ranks_here > host_cores())


def wait_until(done: Callable[[], bool], ranks_here: int) -> None:
    """Wait until done() is true. ranks_here: the number of this job's ranks on this host."""
    # Horovod's synchronize() waits in a loop that takes the core from the codecs and from other ranks: with Gloo, 4 ranks on
    # 2 cores, a step of 113 ms took 29 when this was added. Where each rank has a core, a nap makes the next step's
    # computation slower (41 ms a step against 35), so naps are for long waits there.
    awake = 0 if _contention(ranks_here).is_crowded() else _AWAKE
    began = time.perf_counter()
    while not done():
        waited = time.perf_counter() - began
        if waited < awake:
            os.sched_yield()
        else:
            time.sleep(min(max(_NAP * waited, _SHORTEST), _LONGEST))

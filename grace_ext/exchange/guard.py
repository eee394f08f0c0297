"""A helper process beside a rank, for the time in which the rank's Python cannot run.

Horovod's PyTorch operations hold Python's interpreter lock while they wait for a lock of Horovod's own thread, which may be
waiting for a rank that is stopped. Then no thread of Python runs, and so the watch of stalls.py does not, either. The helper hears
from the watch at each of its looks. While it hears nothing, it looks at the processes that the watch has named last, and
kills one that stays stopped.

This file is also the helper's program. It imports only the standard library, so that the helper starts fast and is small.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

#: States of a process.
GONE, HALTED, RUNS = "gone", "stopped", "runs"
_LOOK = 1.0  # seconds between two looks
_LATER = 2  # looks after which the helper acts later than a watch would, which says in which step its rank waits
_END = 10.0  # seconds for the helper's end


def look_at(pid: int) -> tuple[bytes, str, int]:
    """Look at a process.

    Args:
        pid: Its number.

    Returns:
        Its name, the letter of its state, and when it started, as Linux says.

    Raises:
        OSError: It cannot be looked at, or it is gone.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        begin, _, rest = file.read().rpartition(b")")  # a name may hold anything
    fields = rest.split()
    return begin.partition(b"(")[2], fields[0].decode(), int(fields[19])


def state_of(pid: int, started: int) -> str:
    """Return what a process does.

    Args:
        pid: Its number.
        started: When it started, in the units of the machine's clock, because numbers are used again.

    Returns:
        "gone", "stopped" or "runs"; "runs" if it cannot be told.
    """
    try:
        _, letter, found = look_at(pid)
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:
        return RUNS
    if letter in "ZX" or found != started:
        return GONE
    return HALTED if letter == "T" else RUNS  # "t" is a debugger's stop


class Guard:
    """The helper process of this rank. It ends when this process does, or closes it.

    Args:
        patience: Number of looks, one in each second, after which it kills a stopped rank.
        hint: How a user changes that, for the helper's message.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, patience: float, hint: str):
        command = [sys.executable, "-I", "-S", __file__, repr(patience), hint]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
        assert self._process.stdin is not None  # for mypy
        self._pipe = self._process.stdin
        self._lock = threading.Lock()  # a line from one thread does not get into another one's
        os.set_blocking(self._pipe.fileno(), False)  # a helper that is stopped keeps nobody waiting

    def beat(self, rank: int, host: str, others: Iterable[tuple[int, int, int]]) -> None:
        """Tell the helper that Python runs.

        Args:
            rank: This rank.
            host: Name of its host.
            others: Rank, pid and start of each other rank's process on this machine.
        """
        line = " ".join([str(rank), host, *(":".join(map(str, one)) for one in others)])
        with self._lock, contextlib.suppress(OSError, ValueError):  # it is gone, stopped or closed
            self._pipe.write(line.encode() + b"\n")

    def close(self) -> None:
        """End the helper, and wait for that."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)


class Lookout:
    """What the helper knows, and does.

    Args:
        patience: Number of looks after which a stopped rank is killed.
        hint: See Guard.
        kill: kill(pid, signal) ends a process.
        state: See state_of.
    """

    def __init__(self, patience: float, hint: str, kill: Callable = os.kill, state: Callable[[int, int], str] = state_of):
        self._patience, self._hint, self._kill, self._state = patience, hint, kill, state
        self._rank, self._host = 0, ""
        self._looks: dict[tuple[int, int, int], int] = {}  # at how many looks each other process has been stopped

    def hear(self, line: str) -> None:
        """Take what the rank says: it can look after the others itself.

        Args:
            line: See Guard.beat.
        """
        rank, self._host, *others = line.split(" ")
        self._rank = int(rank)
        self._looks = {(int(a), int(b), int(c)): 0 for a, b, c in (one.split(":") for one in others)}

    def look(self) -> None:
        """Look at the other processes, since the rank has said nothing for a second."""
        states = {one: self._state(*one[1:]) for one in self._looks}
        self._looks = {one: looks + 1 if states[one] == HALTED else 0 for one, looks in self._looks.items()}
        first = min([self._rank, *(one[0] for one, state in states.items() if state == RUNS)])
        patience = self._patience + _LATER + (first != self._rank)  # one rank says it
        for one, looks in self._looks.items():
            if looks >= patience:
                self._end(one, looks)

    def _end(self, other: tuple[int, int, int], looks: int) -> None:
        rank, pid, _ = other
        before = f"grace_ext: rank {self._rank} on {self._host}: "
        said = (
            f"{before}a signal stopped rank {rank} (pid {pid}, on this host) {looks} s ago, and this one waits for it inside of "
            f"Horovod, where no Python runs. It is killed, so that the job ends or, if it is elastic, goes on without it. "
            f"{self._hint}"
        )
        try:
            self._kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError:
            said = f"{before}rank {rank} (pid {pid}) is stopped and cannot be killed from here: this rank ends instead"
            self._kill(os.getppid(), signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.write(2, f"{said}.\n".encode())


def _main(patience: str, hint: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, whose end ends this
    rank, lookout, heard = os.getppid(), Lookout(float(patience), hint), b""
    try:
        started = look_at(rank)[2]
    except OSError:  # it has ended already
        return
    while os.getppid() == rank:
        if select.select([0], [], [], _LOOK)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                return
            *lines, heard = (heard + received).split(b"\n")
            if lines:
                lookout.hear(lines[-1].decode())
        elif state_of(rank, started) == RUNS:  # while it is stopped itself, it waits for nobody
            lookout.look()


if __name__ == "__main__":
    _main(*sys.argv[1:])

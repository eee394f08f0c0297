"""No rank waits for ever for one that is stopped.

A rank that a signal has stopped (SIGSTOP, Ctrl-Z) neither ends nor answers: the others wait for it, its launcher sees
nothing, and Horovod's check for stalls runs in a process that may itself be waiting. So each rank looks at the processes of
those on its own machine, and one that has been stopped for 20 s is killed. That launchers notice: they end the job,
and elastic Horovod goes on without it.

Ranks of other machines cannot be seen from here, and who waits for long may wait for a rank that saves a checkpoint. This is
only reported, unless GRACE_EXT_STALL_SECONDS says when to end.

Time is counted in looks: while all of a job is stopped nobody looks, and it goes on when it is continued.
"""

import atexit
import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..errors import ConfigError
from ..transport.base import Transport
from .engine import Exchange
from .guard import GONE, HALTED, RUNS, Guard
from .rank_process import LEAVES, Process

_LOG = logging.getLogger("grace_ext")
#: In the environment, with their defaults: seconds after which a stopped rank is killed, and after which a rank that waits
#: ends itself; 0: never.
STOPPED, STALL = "GRACE_EXT_STOPPED_SECONDS", "GRACE_EXT_STALL_SECONDS"
_HINT = f"{STOPPED}=N in the environment waits for N seconds, 0 for ever"
_DEFAULTS = {STOPPED: 20.0, STALL: 0.0}  # Horovod's Gloo gives up after 30 s, and does not say on whom
_LOOK = 1.0  # seconds between two looks
_REPORT = 60  # looks after which waiting is reported
_FLUSH = 5.0  # seconds for the output of a rank that ends
_BROKEN = re.compile("Horovod|gloo|NCCL|Connection (closed|reset) by peer")  # errors of a rank that others have left
_EXIT_PATIENCE, _NAP = 5.0, 0.05  # seconds in which those that left should be gone, and between two looks at them
#: Each says whether this process is in the shutdown of a library that waits for other ranks; adapters add theirs.
shutdown_checks: list[Callable[[], bool]] = []


class Watchable(Protocol):
    """What can be watched: an Exchange, or what has one beside other collectives."""

    step: int
    transport: Transport

    def unfinished(self) -> tuple[str, ...]:
        """Name what is under way. Any thread may call it.

        Returns:
            The names; empty between steps.
        """
        raise NotImplementedError


def watch_ranks(exchange: Watchable, gather: Callable[[np.ndarray], np.ndarray], message: np.ndarray) -> np.ndarray:
    """Let the ranks of an exchange watch each other from here on: a collective.

    Args:
        exchange: This rank's exchange.
        gather: gather(uint8[m]), m being the same on all ranks, returns uint8[ranks * m] in any shape.
        message: A message that goes with it, uint8[m].

    Returns:
        The messages of all ranks, uint8[ranks, m].
    """
    own = Process.own(exchange.transport.world_rank)
    gathered = gather(np.concatenate([message, own.pack()])).reshape(exchange.transport.size, -1)
    watcher = _watcher()
    watcher.add(exchange, own, [Process.unpack(record) for record in gathered[:, message.size :]])
    _tell_guards(watcher)  # before the first look, at which it may be too late
    return gathered[:, : message.size]


def check_config_digests(exchange: Exchange, gather: Callable[[np.ndarray], np.ndarray]) -> None:
    """Call Exchange.check_config_digests, in the same collective as `watch_ranks`.

    Args:
        exchange: This rank's exchange.
        gather: See watch_ranks.

    Raises:
        ConfigError: The ranks are configured differently; on all ranks.
    """
    exchange.check_config_digests(watch_ranks(exchange, gather, exchange.config_digest()))


class Watcher:
    """Watches the ranks that this one exchanges with, whenever `check` is called: once a second.

    Args:
        stopped: Number of looks after which a stopped rank is killed; 0: never.
        stall: Number of looks after which a rank that waits ends itself; 0: never.
        kill: kill(pid, signal) ends another process.
        end: end() ends this one.
        shuts_down: Returns whether this process is in a shutdown that waits for other ranks.
    """

    _own: Process  # whose rank elastic Horovod changes

    def __init__(self, stopped: float, stall: float, kill: Callable, end: Callable, shuts_down: Callable[[], bool]):
        self._stopped, self._stall, self._kill, self._end, self._shuts_down = stopped, stall, kill, end, shuts_down
        self._shutting = 0  # at how many looks it did
        self._lock = threading.Lock()  # of _watched, to which another thread may add while this one looks
        self._watched: weakref.WeakKeyDictionary[Watchable, _Watched] = weakref.WeakKeyDictionary()
        self._known_processes: set[Process] = set()  # on this machine, whether or not their exchange is still there
        #: Of processes of this machine: their state, and at how many looks it has been that.
        self._states: dict[Process, tuple[str, int]] = {}

    def add(self, exchange: Watchable, own: Process, ranks: list[Process]) -> None:
        """Watch the ranks of one more exchange, as long as the exchange lives.

        Args:
            exchange: The exchange.
            own: This rank's process.
            ranks: The processes of all ranks.
        """
        self._own = own
        here = [one for one in ranks if one.machine == own.machine and one.pid != own.pid and one.state() != GONE]
        elsewhere = sorted({one.host for one in ranks if one.machine != own.machine})
        with self._lock:
            self._known_processes = {process for process in self._known_processes if process.state() != GONE}.union(here)
            self._watched[exchange] = _Watched(here, elsewhere)

    def _all(self) -> "list[tuple[Watchable, _Watched]]":
        with self._lock:
            return list(self._watched.items())

    def tell(self, guard: Guard) -> None:
        """Let a helper process know whom to look after.

        Args:
            guard: This rank's helper.
        """
        here = {process for _, one in self._all() for process in one.here}
        guard.beat(self._own.rank, self._own.host, [(one.rank, one.pid, one.started) for one in here])

    def check(self) -> None:
        """Look at all ranks once, and act on what is seen."""
        self._shutting = self._shutting + 1 if self._shuts_down() else 0
        idle = {exchange: one for exchange, one in self._all() if not one.goes_on(exchange)}
        before, self._states = self._states, {}
        waited_for = {process for one in idle.values() for process in one.here}
        for process in self._known_processes if self._shutting else waited_for:
            state = process.state()
            known, looks = before.get(process, (state, 0))
            self._states[process] = state, looks + 1 if state == known else 1
        if self._stopped:
            self._kill_stopped(idle)
        for exchange, one in idle.items():
            if one.waits:
                self._check_waiting(_where(exchange), one)
        self._check_shutdown()

    def _which(self, state: str, looks: float = 1) -> list[Process]:
        """Processes of this machine that have been in the state at so many looks."""
        return [process for process, (known, seen) in self._states.items() if known == state and seen >= looks]

    def _kill_stopped(self, idle: dict) -> None:
        first = min(process.rank for process in (self._own, *self._which(RUNS)))
        patience = self._stopped + (first != self._own.rank)  # one rank says it, and another only if that one cannot
        for process in self._which(HALTED, patience):
            seconds = self._states[process][1]
            waiting = [_where(exchange) for exchange, one in idle.items() if process in one.here]
            where = "in hvd.shutdown()" if self._shutting else waiting[0]
            self._say(
                f"a signal stopped rank {process.rank} (pid {process.pid}, on this host) {seconds} s ago, and others "
                f"wait for it, this one {where}. It is killed, so that the job ends or, if it is elastic, goes on "
                f"without it. {_HINT}"
            )
            try:
                self._kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                self._say(f"rank {process.rank} cannot be killed from here: this rank ends instead")
                self._end()

    def _check_waiting(self, where: str, one: "_Watched") -> None:
        """End this rank if what it waits for cannot come, or if that is wanted; report it otherwise."""
        gone = [process for process in self._which(GONE, self._stopped) if process in one.here]
        if self._stopped and gone and one.waits >= self._stopped and not is_elastic():
            self._say(
                f"has waited for {one.waits} s, {where}, and rank {gone[0].rank} (pid {gone[0].pid}, on this host) is "
                f"gone: this rank ends, too. {_HINT}"
            )
            self._end()
        elif self._stall and one.waits >= self._stall:
            self._say(f"has waited for {one.waits} s, {where}. {self._known(one)}. {STALL} says {self._stall:g}: it ends")
            self._end()
        elif one.waits == _REPORT:
            _LOG.warning(
                f"rank {self._own.rank} has waited for {one.waits} s, {where}. {self._known(one)}. Others may compute for "
                f"long, or save something. {STALL}=N in the environment ends a rank that has waited for N seconds"
            )

    def _check_shutdown(self) -> None:
        """It waits for nothing but the other ranks' threads of Horovod, one of which may never come: see _horovod/exits.py. A
        rank that is stopped has a time of its own, and is named."""
        if self._stopped and self._shutting >= self._stopped and not is_elastic() and not self._which(HALTED):
            self._say(
                f"has been in hvd.shutdown() for {self._shutting} s, and other ranks do not answer: this rank ends. {_HINT}"
            )
            self._end()

    def name_who_left(self, wait: Callable[[], bool]) -> None:
        """Say which ranks of this host have stopped or ended, if any have.

        Args:
            wait: Returns whether to wait any longer for the end of those that left, which may take seconds.
        """
        ranks = {process for _, one in self._all() for process in one.here}
        while not any(process.state() != RUNS for process in ranks) and wait():
            pass
        states = {process.rank: GONE if process.is_leaving() else process.state() for process in ranks}
        if found := [f"rank {rank} is {state}" for rank, state in sorted(states.items()) if state != RUNS]:
            self._say(f"fails because of others; on this host, {', '.join(found)}")

    def _known(self, one: "_Watched") -> str:
        stopped = ", ".join(str(process.rank) for process in self._which(HALTED))
        return f"Ranks of this host ({self._own.host}) that a signal has stopped: {stopped or 'none'}" + (
            f"; ranks of {', '.join(one.elsewhere)} cannot be seen from here" if one.elsewhere else ""
        )

    def _say(self, what: str) -> None:
        """Past Python's own buffers, which somebody may hold."""
        with contextlib.suppress(OSError):
            os.write(2, f"grace_ext: rank {self._own.rank} on {self._own.host}: {what}.\n".encode())


class _Watched:
    """What is known of an exchange. here, elsewhere: the other ranks' processes on this machine, and the hosts that are not
    this machine. waits: at how many looks its step was under way and had not got any further."""

    def __init__(self, here: list[Process], elsewhere: list[str]):
        self.here, self.elsewhere, self.waits = here, elsewhere, 0
        self._mark: tuple | None = None

    def goes_on(self, exchange: Watchable) -> bool:
        """Whether it has got any further since the last look. Then none of its ranks is stopped."""
        before, self._mark = self._mark, (exchange.step, exchange.unfinished())
        same = self._mark == before
        self.waits = self.waits + 1 if same and self._mark[1] else 0
        return not same


def _where(exchange: Watchable) -> str:
    unfinished = exchange.unfinished()
    return f"in step {exchange.step}" + (f" for {unfinished[0]!r}" if unfinished else "")


_watchers: list[Watcher] = []  # one, once there is something to look after
_making = threading.Lock()
_guards: list[Guard] = []  # one, where it is wanted


def _watcher() -> Watcher:
    with _making:  # two exchanges may begin in two threads at the same time
        if not _watchers:
            _watchers.append(Watcher(_seconds(STOPPED), _seconds(STALL), os.kill, _end, _shuts_down))
            threading.Thread(target=_watch_loop, args=_watchers, name="grace_ext stalls", daemon=True).start()
            atexit.register(_report_at_exit, *_watchers)
        return _watchers[0]


def start_guard() -> None:
    """Have a helper process look after the other ranks while this one's Python cannot run; see guard.py. Once is enough.

    Where it cannot be started, the logger `grace_ext` says so, and the rank goes on without it.
    """
    if not _guards and (stopped := _seconds(STOPPED)):
        try:
            _guards.append(Guard(stopped, _HINT))
        except OSError as error:
            _LOG.warning(f"no helper process looks after ranks that are stopped while Horovod lets no Python run: {error}")
        else:
            atexit.register(_guards[0].close)


def _shuts_down() -> bool:
    return any(check() for check in shutdown_checks)


def is_elastic() -> bool:
    """Say whether this process was started by elastic Horovod, which notices by itself that ranks do not answer, and goes on.

    Returns:
        The answer.
    """
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def _watch_loop(watcher: Watcher) -> None:
    while True:
        time.sleep(_LOOK)
        watcher.check()
        _tell_guards(watcher)


def _tell_guards(watcher: Watcher) -> None:
    for guard in _guards:
        watcher.tell(guard)


def _report_at_exit(watcher: Watcher) -> None:
    """At the end of this rank. If it only fails because others left, it lets these end first, which launchers name then, and
    names them itself. Else it says by its process's name that it was not left by others."""
    error = getattr(sys, "last_value", None)  # that nobody caught
    if error is None or not _BROKEN.search(f"{type(error).__name__}: {error}"):
        with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as file:
            file.write(LEAVES)
        return
    end = time.monotonic() + _EXIT_PATIENCE

    def wait() -> bool:
        time.sleep(_NAP)
        return time.monotonic() < end

    watcher.name_who_left(wait)


def _seconds(variable: str) -> float:
    text = os.environ.get(variable)
    try:
        seconds = _DEFAULTS[variable] if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{variable}={text}; allowed: seconds, 0 for never")
    return seconds


def _end() -> None:
    """This process, whatever its other threads hold or wait for."""
    flush = threading.Thread(target=lambda: [stream.flush() for stream in (sys.stdout, sys.stderr)], daemon=True)
    flush.start()
    flush.join(_FLUSH)
    os._exit(1)

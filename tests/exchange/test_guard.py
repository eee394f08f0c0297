"""The helper process that kills a stopped rank while the own rank's Python cannot run. With Horovod: tests/adapters/local_steps."""

import os
import signal
import subprocess
import sys
import time

import pytest

from grace_ext.exchange import stalls
from grace_ext.exchange.guard import Guard, Lookout, look_at

PATIENCE = 5
OTHERS = [(0, 100, 7), (2, 102, 8)]


class Watched:
    """Rank 1's helper; states stands for what the others' processes do."""

    def __init__(self, refuse=False):
        self.killed, self.states, self.refuse = [], dict.fromkeys([100, 102], "runs"), refuse
        self.lookout = Lookout(PATIENCE, "HINT", self.kill, lambda pid, started: self.states[pid])
        self.hear()

    def hear(self):
        self.lookout.hear("1 here 0:100:7 2:102:8")

    def kill(self, pid, number):
        if self.refuse and pid in self.states:
            raise PermissionError
        self.killed.append((pid, number))

    def look(self, times):
        for _ in range(times):
            self.lookout.look()


def test_a_stopped_rank_is_killed_once_a_watch_would_have_done_it(capfd):
    job = Watched()
    job.states.update({100: "stopped", 102: "stopped"})
    job.look(PATIENCE + 1)
    assert not job.killed
    job.look(1)
    assert job.killed == [(100, signal.SIGKILL), (102, signal.SIGKILL)]
    said = capfd.readouterr().err
    for part in ("rank 1 on here", "a signal stopped rank 0 (pid 100, on this host) 7 s ago", "is killed", "HINT."):
        assert part in said


def test_time_counts_from_when_the_rank_was_heard_last():
    job = Watched()
    job.states[102] = "stopped"
    for _ in range(3):
        job.look(PATIENCE + 1)
        job.hear()
    assert not job.killed


def test_time_in_which_the_other_rank_ran_does_not_count():
    job = Watched()
    for state in ("stopped", "runs", "stopped"):
        job.states[100] = job.states[102] = state
        job.look(PATIENCE + 1)
    assert not job.killed


def test_the_first_rank_that_runs_kills():
    job = Watched()
    job.states[102] = "stopped"
    job.look(PATIENCE + 2)  # rank 0 runs
    assert not job.killed
    job.look(1)
    assert job.killed == [(102, signal.SIGKILL)]


def test_who_may_not_kill_ends_the_own_rank(capfd):
    job = Watched(refuse=True)
    job.states[100] = "stopped"
    job.look(PATIENCE + 2)
    assert job.killed == [(os.getppid(), signal.SIGKILL)]
    assert "rank 0 (pid 100) is stopped and cannot be killed from here" in capfd.readouterr().err


def test_it_ends_when_it_is_closed():
    guard = Guard(PATIENCE, "")
    guard.beat(0, "here", [])
    guard.close()
    assert guard._process.returncode == 0
    guard.beat(0, "here", [])  # nobody hears it


def test_it_ends_with_its_rank():
    rank = "from grace_ext.exchange.guard import Guard; print(Guard(5, '')._process.pid); import os; os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-u", "-c", rank], stdout=subprocess.PIPE, text=True)
    pid, hangs = int(done.stdout), time.monotonic() + 600
    while _is_there(pid):
        assert time.monotonic() < hangs
        time.sleep(0.05)


def _is_there(pid):
    try:
        return look_at(pid)[1] != "Z"  # nobody here waits for processes without a parent
    except OSError:
        return False


def test_where_it_cannot_be_started_the_rank_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    monkeypatch.setattr(stalls, "_guards", [])
    stalls.start_guard()
    assert not stalls._guards and "no helper process looks after ranks" in caplog.text


# A C function that keeps the interpreter lock, as Horovod's operations do, until the other process has ended.
RANK = """
import ctypes, os, signal, subprocess, sys
import numpy as np
from grace_ext.exchange import stalls
from grace_ext.exchange.guard import look_at
from grace_ext.exchange.rank_process import Process
from grace_ext.transport import InProcessGroup

other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
records = [Process.own(0), Process.own(1)._replace(pid=other.pid, started=look_at(other.pid)[2])]
exchange = type("Exchange", (), {"step": 3, "unfinished": lambda _: ("weights",)})()
exchange.transport = InProcessGroup(2).transport(0)
stalls.start_guard()
stalls.watch_ranks(exchange, lambda _: np.stack([one.pack() for one in records]), np.empty(0, np.uint8))
os.kill(other.pid, signal.SIGSTOP)
ctypes.PyDLL(None).waitpid(other.pid, None, 0)
print("goes on")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="Linux says what a process is at")
def test_a_stopped_rank_is_killed_while_no_python_runs():
    done = subprocess.run(
        [sys.executable, "-c", RANK],
        env={**os.environ, "GRACE_EXT_STOPPED_SECONDS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "goes on\n", done.stderr
    assert "a signal stopped rank 1" in done.stderr and "inside of Horovod" in done.stderr
    assert "GRACE_EXT_STOPPED_SECONDS=N in the environment" in done.stderr

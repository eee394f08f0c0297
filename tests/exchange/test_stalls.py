"""Ranks that are stopped, gone or late, as the others see them. Looks are counted here: no clock. With real ranks:
tests/fuzz."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.exchange import guard, stalls
from grace_ext.exchange.rank_process import Process
from grace_ext.exchange.stalls import Watcher
from grace_ext.transport import InProcessGroup

HERE, ELSEWHERE = b"thisone_", b"another_"
STOPPED = 5  # looks


class Exchange:
    """step and open stand for how far one is."""

    def __init__(self, step=7, *open_):
        self.step, self.open = step, open_

    def unfinished(self):
        return self.open


class Ranks:
    """Of one job: rank 0 looks after the others, whose processes are in `states`."""

    def __init__(self, monkeypatch, capfd, stall=0, machines=(HERE,) * 3, own=0, stopped=STOPPED):
        self.ended, self.capfd, self.shuts_down = [], capfd, False
        self.ranks = [
            Process(machine, rank, 100 + rank, 1, {HERE: "here", ELSEWHERE: "there"}[machine])
            for rank, machine in enumerate(machines)
        ]
        self.states = dict.fromkeys(range(len(machines)), "runs")
        monkeypatch.setattr(Process, "state", lambda process: self.states[process.rank])
        self.watcher = Watcher(
            stopped,
            stall,
            lambda *given: self.ended.append(given),
            lambda: self.ended.append("this"),
            lambda: self.shuts_down,
        )
        self.exchange = Exchange(7, "weights")
        self.watcher.add(self.exchange, self.ranks[own], self.ranks)
        self.watcher.check()  # from here on nothing has got any further

    def look(self, times):
        for _ in range(times):
            self.watcher.check()

    def said(self):
        return self.capfd.readouterr().err


@pytest.fixture
def ranks(monkeypatch, capfd):
    return lambda **options: Ranks(monkeypatch, capfd, **options)


def test_a_stopped_rank_is_killed_after_its_time_and_named(ranks):
    job = ranks()
    job.states[1] = "stopped"
    job.look(STOPPED - 1)
    assert not job.ended and not job.said()
    job.look(1)
    assert job.ended == [(101, signal.SIGKILL)]
    said = job.said()
    for part in ("rank 0 on here", "rank 1 (pid 101", "5 s ago", "step 7 for 'weights'", "GRACE_EXT_STOPPED_SECONDS=N"):
        assert part in said, said


def test_time_that_a_rank_was_running_again_counts_anew(ranks):
    job = ranks()
    for state in ("stopped", "runs", "stopped"):
        job.states[1] = state
        job.look(STOPPED - 1)
    assert not job.ended
    job.look(1)
    assert job.ended == [(101, signal.SIGKILL)]


def test_where_steps_go_on_nobody_is_stopped(ranks):
    """Who looks at a rank that was stopped for a moment in each look still does nothing."""
    job = ranks()
    job.states[1] = "stopped"
    for step in range(3 * STOPPED):
        job.exchange.step = step
        job.look(1)
    assert not job.ended


def test_a_rank_that_waits_in_no_step_looks_as_well(ranks):
    """As in a collective of the user's own."""
    job = ranks()
    job.exchange.open, job.states[1] = (), "stopped"
    job.look(STOPPED + 1)
    assert job.ended == [(101, signal.SIGKILL)] and "step 7." in job.said()


def test_the_first_rank_that_runs_speaks_and_the_next_one_if_it_cannot(ranks):
    job = ranks(own=1)
    job.states[2] = "stopped"
    job.look(STOPPED)
    assert not job.ended  # this is for rank 0 to do
    job.look(1)
    assert job.ended == [(102, signal.SIGKILL)]


def test_who_may_not_kill_ends_itself(ranks, monkeypatch):
    job = ranks()

    def refuse(*_):
        raise PermissionError

    job.watcher._kill, job.states[1] = refuse, "stopped"
    job.look(STOPPED)
    assert job.ended == ["this"] and "rank 1 cannot be killed from here" in job.said()


def test_zero_means_never(ranks):
    job = ranks(stopped=0)
    job.states.update({1: "stopped", 2: "gone"})
    job.look(10 * STOPPED)
    assert not job.ended


def test_who_waits_for_a_rank_that_is_gone_ends_too(ranks, monkeypatch):
    job = ranks()
    job.states[2] = "gone"
    job.look(STOPPED - 1)
    assert not job.ended
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # Horovod notices, and goes on
    job.look(1)
    assert not job.ended
    monkeypatch.delenv("HOROVOD_ELASTIC")
    job.look(1)
    assert job.ended == ["this"] and "rank 2 (pid 102, on this host) is gone" in job.said()


def test_a_rank_that_is_gone_is_no_harm_where_nothing_waits(ranks):
    job = ranks()
    job.states[2], job.exchange.open = "gone", ()
    job.look(10 * STOPPED)
    assert not job.ended


def test_waiting_without_a_reason_that_can_be_seen_is_reported_once(ranks, caplog):
    job = ranks(machines=(HERE, HERE, ELSEWHERE))
    job.states[2] = "stopped"  # which nobody sees
    with caplog.at_level(logging.WARNING, "grace_ext"):
        job.look(stalls._REPORT - 1)
        assert not caplog.messages
        job.look(10)
    (text,) = caplog.messages
    for part in (
        "rank 0 has waited for 60 s, in step 7 for 'weights'",
        "stopped: none",
        "ranks of there cannot be seen",
        "GRACE_EXT_STALL_SECONDS=N",
    ):
        assert part in text, text
    assert not job.ended


def test_exchanges_may_be_added_while_the_others_are_looked_at(ranks):
    """A dict that changes in the middle of a look would end the thread that looks."""
    job, kept, interval = ranks(), [Exchange(7, "weights") for _ in range(3000)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding = threading.Thread(target=lambda: [job.watcher.add(one, job.ranks[0], job.ranks[:1]) for one in kept])
        adding.start()
        while adding.is_alive():
            job.look(1)
        adding.join()
    finally:
        sys.setswitchinterval(interval)
    assert not job.ended


def test_the_user_says_how_long_a_rank_waits(ranks):
    job = ranks(stall=80)
    job.look(79)
    assert not job.ended
    job.exchange.open = ("weights", "another")  # it got further: the time begins anew
    job.look(80)
    assert not job.ended
    job.look(1)
    assert job.ended == ["this"] and "GRACE_EXT_STALL_SECONDS says 80" in job.said()


def test_who_shuts_horovod_down_does_not_wait_for_ever_for_the_others(ranks, monkeypatch):
    job = ranks()
    job.exchange.open = ()
    for job.shuts_down in (True, False, True):
        job.look(STOPPED - 1)
    assert not job.ended
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    job.look(1)
    assert not job.ended
    monkeypatch.delenv("HOROVOD_ELASTIC")
    job.look(1)
    assert job.ended == ["this"] and "rank 0 on here: has been in hvd.shutdown() for 6 s" in job.said()


@pytest.mark.parametrize("is_kept", [True, False], ids=["exchange-kept", "exchange-gone"])
def test_who_shuts_horovod_down_names_those_that_are_stopped_later(ranks, is_kept):
    """At exit, when this rank may have been there first, and what the ranks exchanged by may be gone."""
    job = ranks()
    job.exchange.open = ()
    if not is_kept:
        job.exchange = None
    job.shuts_down = True
    job.look(2)
    job.states[1] = "stopped"
    job.look(STOPPED - 1)
    assert not job.ended
    job.look(1)
    assert job.ended == [(101, signal.SIGKILL)] and "rank 1 (pid 101" in job.said()


# Python 3.11 can hang in sys._current_frames if a collection of garbage lets another thread run that begins a thread.
LOOKS = """
import gc, threading, time
from grace_ext.exchange import stalls

class Garbage:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        time.sleep(0)

def make_threads():
    while not over:
        threading.Thread(target=int).start()

over = []
watcher = stalls.Watcher(0, 0, None, None, stalls._shuts_down)
maker = threading.Thread(target=make_threads)
maker.start()
gc.set_threshold(1)
try:
    for _ in range(3000):
        garbage = Garbage()
        watcher.check()
finally:
    over.append(True)
    maker.join()  # a thread that begins others while the interpreter ends may crash it
"""


def test_looks_never_hang():
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", LOOKS], check=True, timeout=600)


def test_a_rank_that_fails_names_those_that_left_or_are_stopped(ranks, monkeypatch):
    job = ranks(machines=(HERE, HERE, HERE, ELSEWHERE))
    job.watcher.name_who_left(lambda: False)
    assert not job.said()

    def leave():
        job.states.update({1: "gone", 3: "gone"})  # the last one's process cannot be seen
        return True

    job.watcher.name_who_left(leave)
    assert "rank 0 on here: fails because of others; on this host, rank 1 is gone." in job.said()
    monkeypatch.setattr(Process, "is_leaving", lambda process: process.rank == 2)
    job.states[1] = "stopped"
    job.watcher.name_who_left(lambda: False)
    assert "on this host, rank 1 is stopped, rank 2 is gone." in job.said()


def test_ranks_forget_exchanges_that_are_gone(ranks):
    job = ranks()
    job.states[1], job.exchange = "stopped", None
    job.look(STOPPED + 1)
    assert not job.ended


def test_a_record_holds_what_a_rank_says_of_itself():
    own = Process.own(3)
    assert (own.rank, own.pid) == (3, os.getpid()) and own.state() == "runs"
    assert Process.unpack(own.pack()) == own
    odd = own._replace(host="höst" * 30)
    assert Process.unpack(odd.pack())[:-1] == own[:-1]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="Linux says what a process is at")
def test_states_are_what_linux_says():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process(HERE, 1, child.pid, guard.look_at(child.pid)[2], "here")
    assert process.state() == "runs"
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process.state() == "stopped"
    assert process._replace(started=process.started + 1).state() == "gone"  # its number is used again
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.state() == "gone"  # a zombie
    child.wait()
    child.stdin.close()
    assert process.state() == "gone"


@pytest.mark.skipif(not os.path.exists("/proc/self/comm"), reason="Linux has names of processes")
@pytest.mark.parametrize(
    "error, left",
    [
        (None, True),
        (RuntimeError("rank 1 gives up"), True),
        (RuntimeError("Horovod has been shut down. This was"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:535] Connection closed by peer"), False),
    ],
)
def test_a_rank_that_ends_tells_those_it_leaves(monkeypatch, error, left):
    asked = []
    noting = type("Noting", (), {"name_who_left": lambda _, wait: asked.append(wait)})()
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    own, (before, *_) = Process.own(0), guard.look_at(os.getpid())
    try:
        stalls._report_at_exit(noting)
        assert own.is_leaving() == left and own.state() == "runs"
        assert len(asked) == (not left)
    finally:
        with open("/proc/self/comm", "wb") as file:
            file.write(before)


def test_exchanges_that_begin_at_the_same_time_have_one_watcher(monkeypatch):
    both = threading.Barrier(2)

    def slow(*_):  # the second thread arrives while the first one makes it, or is held up before
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return object()

    made = []
    monkeypatch.setattr(stalls, "_watchers", made)
    monkeypatch.setattr(stalls, "Watcher", slow)
    monkeypatch.setattr(stalls, "_watch_loop", lambda _: None)
    monkeypatch.setattr(stalls.atexit, "register", lambda *_: None)
    threads = [threading.Thread(target=stalls._watcher) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_this_process_ends_whatever_its_threads_hold():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """if True:
        import sys, threading, time
        from grace_ext.exchange import stalls
        stalls._FLUSH = 0.1
        sys.stdout = type("Stuck", (), {"write": lambda *_: None, "flush": lambda _: time.sleep(10**6)})()
        threading.Thread(target=time.sleep, args=[10**6]).start()
        stalls._end()""",
        ],
        timeout=600,
    )
    assert done.returncode == 1


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_what_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv(stalls.STALL, text)
    with pytest.raises(ConfigError, match=stalls.STALL):
        stalls._seconds(stalls.STALL)


def test_ranks_are_watched_from_when_their_configurations_are_known(monkeypatch):
    """Here all of them are one process, which nobody has to look after."""
    added = []
    monkeypatch.setattr(stalls, "_watchers", [type("Noting", (), {"add": lambda _, *given: added.append(given)})()])
    transports = [InProcessGroup(2).transport(rank) for rank in range(2)]
    known = []
    exchange = type(
        "Exchange",
        (),
        {
            "transport": transports[1],
            "config_digest": lambda _: np.arange(16, dtype=np.uint8),
            "check_config_digests": lambda _, rows: known.append(rows),
        },
    )()
    stalls.check_config_digests(exchange, lambda record: np.tile(record, 2))
    assert np.array_equal(known[0], [np.arange(16)] * 2)
    ((one, own, ranks),) = added
    assert one is exchange and own.rank == 1 and ranks == [own, own]

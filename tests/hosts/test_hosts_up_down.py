"""mpirun/hosts: making and removing hosts, and what is left behind, which is nothing."""

import signal
import subprocess
from pathlib import Path

import pytest
from support.hosts import CANNOT, SCRIPT, Hosts, hosts, namespaces, start, state_of, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.tier("test")]


def processes_that_see(folder: Path) -> list[str]:
    """The processes in whose mount namespace something of the state folder is mounted: all on the hosts."""
    found = []
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            if str(folder) in mounts.read_text():
                found.append(mounts.parent.name)
        except OSError:  # it has just ended
            continue
    return found


def assert_nothing_is_left(folder: Path, name="tests"):
    assert not namespaces(name)
    assert not state_of(name).exists()
    assert wait_until(lambda: not processes_that_see(folder)), processes_that_see(folder)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in links.splitlines() if name in line]


def test_down_leaves_nothing_and_may_be_repeated(machine):
    with Hosts("tests", 2, "100mbit") as up:
        folder = state_of()
        running = up.start("exec", 2, "sh", "-c", "echo started; sleep 1000")
        assert running.stdout.readline() == "started\n"
        assert processes_that_see(folder)
        up("down")
        assert running.wait(300) != 0
        running.stdout.close()
        assert_nothing_is_left(folder)
        assert up("down") == ""
        assert "no hosts are up" in up("bytes", check=False)


def up_60():
    return start("--name", "tests", "up", "60", "none")


def half_made(process) -> Path:
    """Wait until `up 60` has made some of its hosts."""
    assert wait_until(lambda: len(namespaces()) >= 5 or process.poll() is not None) and process.poll() is None
    return state_of()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_takes_down_what_it_made_when_it_is_stopped(machine, number):
    process = up_60()
    folder = half_made(process)
    process.send_signal(number)
    assert process.wait(300) != 0
    process.stdout.close()
    assert_nothing_is_left(folder)


def test_up_takes_down_what_it_made_when_something_fails(machine):
    done = hosts("--name", "tests", "up", "2", "99999999999999gbit")
    assert done.returncode == 1 and "tc" in done.stdout, done.stdout
    assert not namespaces() and not state_of().exists()


def test_up_works_over_what_a_killed_run_left(machine):
    process = up_60()
    half_made(process)
    process.kill()
    process.communicate()
    assert len(namespaces()) >= 5
    with Hosts("tests", 1, "none") as up:
        assert len(namespaces()) == 2
        assert up("exec", 1, "hostname") == "host1\n"


def test_wrong_arguments_are_explained(machine):
    for arguments, words in (
        (("up", "0", "1gbit"), "1 to 250"),
        (("up", "2", "fast"), "100mbit"),
        (("up", "2"), "RATE"),
        (("exec", "1"), "exec needs a command"),
        (("--name", "a/b", "down"), "other characters"),
    ):
        done = hosts(*arguments)
        assert done.returncode == 2 and words in done.stdout, done.stdout


def test_root_is_needed(machine):
    done = subprocess.run(["unshare", "--user", str(SCRIPT), "up", "2", "none"], capture_output=True, text=True)
    assert done.returncode == CANNOT and "needs root" in done.stderr


def test_help_tells_every_subcommand():
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    for command in ("up", "rate", "exec", "bytes", "crash", "boot", "down"):
        assert f"hosts {command}" in done.stdout

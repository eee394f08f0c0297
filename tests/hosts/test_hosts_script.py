"""mpirun/hosts: what its subcommands do on hosts that are up."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts import CANNOT, ENVIRONMENT, SCRIPT, Hosts, id_of, namespaces, state_of, wait_until

HERE = Path(__file__).parent
MEGABYTE = 1_000_000

pytestmark = [pytest.mark.mpi, pytest.mark.tier("test")]


@pytest.fixture
def folder(three):
    return state_of()


def test_hosts_have_names_addresses_processes_and_memory_of_their_own(three, tmp_path):
    for host in (1, 2, 3):
        assert three("exec", host, "hostname") == f"host{host}\n"
        assert f"inet 10.77.0.{host}/" in three("exec", host, "ip", "-4", "addr", "show", "eth0")
        assert three("exec", host, "sh", "-c", "ls /dev/shm; touch /dev/shm/mine; ls /dev/shm") == "mine\n"
        listed = three("exec", host, "ps", "-A", "-o", "pid=,comm=").split()
        assert listed[:2] == ["1", "sshd"] and listed[3:] == ["ps"], listed
    three("exec", 1, "ipcmk", "-Q")
    assert "0x" in three("exec", 1, "ipcs", "-q") and "0x" not in three("exec", 2, "ipcs", "-q")


def test_exec_keeps_input_output_status_folder_and_environment(three, tmp_path):
    program = "read line; echo $line; echo to stderr >&2; pwd; echo $OURS; exit 7"
    process = three.start(
        "exec", "host2", "sh", "-c", program, stdin=subprocess.PIPE, cwd=tmp_path, env={**ENVIRONMENT, "OURS": "a  b"}
    )
    output, _ = process.communicate("hello\n", timeout=300)
    assert process.returncode == 7
    assert output.splitlines() == ["hello", "to stderr", str(tmp_path), "a b"]
    assert three("exec", 1, "printenv", "PATH").strip() == ENVIRONMENT["PATH"]
    assert three.run("exec", 1, "sh", "-c", "kill -KILL $$").returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)


def test_a_command_ends_with_its_exec(three):
    process = three.start("exec", 1, "sh", "-c", "echo started; exec sleep 1000")
    assert process.stdout.readline() == "started\n"
    process.terminate()
    process.wait(300)
    assert wait_until(lambda: "sleep" not in three("exec", 1, "ps", "-A", "-o", "comm="))


def test_ssh_goes_by_name_and_takes_no_other_key(three, folder, tmp_path):
    for target, answer in (("host1", "host1"), ("host2", "host2"), ("10.77.0.3", "host3")):
        assert three("exec", 1, "ssh", target, "hostname") == f"{answer}\n"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    plain = [
        "ssh",
        "-F",
        "/dev/null",
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        f"UserKnownHostsFile={tmp_path / 'known'}",
        "-o",
        "LogLevel=ERROR",
        "-o",
        "BatchMode=yes",
    ]
    assert three("exec", 1, *plain, "-i", folder / "key", "root@host2", "hostname") == "host2\n"
    refused = three.run("exec", 1, *plain, "-i", tmp_path / "other", "root@host2", "hostname")
    assert refused.returncode == 255 and "Permission denied (publickey)" in refused.stdout


def test_keys_are_for_root_alone_and_outside_the_checkout(three, folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == 0
    for key in ("key", "host_key"):
        assert stat.S_IMODE((folder / key).stat().st_mode) == 0o600
    assert SCRIPT.parents[1] not in folder.parents


@pytest.fixture
def receivers(three):
    started = [three.start("exec", host, sys.executable, HERE / "transfer.py", "receive") for host in (1, 2, 3)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    yield
    for process in started:
        process.terminate()
        process.communicate()


def limits() -> dict:
    """(host, "out" or "in") -> bits per second, how many packets have had to wait for their turn; of links with a limit."""
    found, name = {}, id_of("tests")
    for host in (1, 2, 3):
        for way, namespace, device in (("out", f"{name}.host{host}", "eth0"), ("in", f"{name}.switch", f"v{host}")):
            command = ["tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device]
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for row in json.loads(shown):
                if row["kind"] == "tbf":
                    found[host, way] = 8 * row["options"]["rate"], row["overlimits"]
    return found


def seconds(three, sender, receiver, size):
    """How long a transfer takes. A limit makes sure of a least time on every machine, and only of that."""
    return float(three("exec", sender, sys.executable, HERE / "transfer.py", "send", f"host{receiver}", size))


def test_a_rate_holds_in_both_directions_and_for_its_host_only(three, receivers):
    for megabits in (16, 128):
        three("rate", f"{megabits}mbit", 2)
        before = limits()
        assert {link: rate for link, (rate, _) in before.items()} == {(2, "out"): megabits * 1e6, (2, "in"): megabits * 1e6}
        seconds(three, 1, 3, MEGABYTE)
        assert limits() == before, "host 2 had no part in this"
        for sender, receiver, way in ((1, 2, "in"), (2, 1, "out")):
            waited = limits()[2, way][1]
            assert seconds(three, sender, receiver, MEGABYTE) > 0.9 * 8 * MEGABYTE / (megabits * 10**6)
            assert limits()[2, way][1] > waited, f"nothing had to wait on the way {way}"
    three("rate", "16mbit")
    assert {rate for rate, _ in limits().values()} == {16 * 10**6} and len(limits()) == 6
    assert seconds(three, 1, 3, MEGABYTE) > 0.9 * 8 * MEGABYTE / 16e6
    three("rate", "none")
    assert limits() == {}


def test_small_messages_are_limited_too(three, receivers):
    # With tbf's usual large bursts, this many bytes would go at full speed after every pause.
    three("rate", "16mbit")
    small = seconds(three, 1, 2, 50_000)
    three("rate", "none")
    assert small > 0.5 * 50_000 * 8 / 16e6, small


def test_bytes_counts_what_each_host_sends_and_receives(three, receivers):
    before = three.bytes()
    three("exec", 1, sys.executable, HERE / "transfer.py", "send", "host2", MEGABYTE)
    after = three.bytes()
    grown = {(host, way): after[host][way] - before[host][way] for host in before for way in ("rx", "tx")}
    assert MEGABYTE < grown["host1", "tx"] < 1.2 * MEGABYTE, grown
    assert MEGABYTE < grown["host2", "rx"] < 1.2 * MEGABYTE, grown
    assert all(grown[key] < 0.1 * MEGABYTE for key in grown if key not in (("host1", "tx"), ("host2", "rx"))), grown


ROUND_TRIP = """
import socket, sys, time
connection = socket.create_connection(("host2", 22))
connection.recv(100)
began = time.monotonic()
connection.sendall(b"SSH-2.0-none\\r\\n")
while connection.recv(10000):
    break
print(time.monotonic() - began)
"""


def test_packets_take_longer_with_a_delay_and_rates_still_hold(three, receivers):
    assert three.run("delay", "60").returncode == 0
    try:
        trip = float(three("exec", 1, sys.executable, "-c", ROUND_TRIP))
        assert trip > 2 * 0.06, trip
        three("rate", "16mbit", 2)
        assert seconds(three, 1, 2, MEGABYTE) > 0.9 * 8 * MEGABYTE / 16e6 + 2 * 0.06
        assert three("exec", 1, "ssh", "host3", "hostname") == "host3\n"
        three("crash", 2)
        three("boot", 2)
        assert three("exec", 1, "ssh", "host2", "hostname") == "host2\n"
        assert float(three("exec", 1, sys.executable, "-c", ROUND_TRIP)) > 2 * 0.06
    finally:
        three("delay", "0")
        three("rate", "none")
    assert three("exec", 1, "ssh", "host3", "hostname") == "host3\n"
    switch = f"{id_of('tests')}.switch"
    assert not subprocess.run(["ip", "netns", "pids", switch], capture_output=True, text=True, check=True).stdout.split()


SPIN = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 1:
    pass
print((time.process_time() - used) / (time.monotonic() - began))
"""


@pytest.fixture
def limited(three):
    limited = three.run("cores", "0.2", 2)
    if limited.returncode == CANNOT:
        pytest.skip(limited.stdout.strip())
    assert limited.returncode == 0, limited.stdout
    yield
    three("cores", "none")


def test_processor_time_is_limited_for_one_host_whoever_started_the_process(three, limited):
    """Far more than 0.3 of a core is what a process gets without a limit, unless others keep all cores busy."""
    assert float(three("exec", 2, sys.executable, "-c", SPIN)) < 0.3
    by_ssh = three("exec", 1, "ssh", "host2", f"{sys.executable} - <<'END'\n{SPIN}END\n")
    assert float(by_ssh) < 0.3
    three("crash", 2)
    three("boot", 2)
    by_ssh = three("exec", 1, "ssh", "host2", f"{sys.executable} - <<'END'\n{SPIN}END\n")
    assert float(by_ssh) < 0.3
    assert throttled(2) and not throttled(1)
    running = three.start("exec", 1, sys.executable, "-c", "print('started', flush=True)\nwhile True: pass")
    try:
        assert running.stdout.readline() == "started\n"
        three("cores", "0.2", 1)
        assert wait_until(lambda: throttled(1)), "processes that run already are limited, too"
    finally:
        running.terminate()
        running.communicate(timeout=300)


def throttled(host: int) -> int:
    """How often the host's processes have had to wait for their share."""
    group = f"{id_of('tests')}.host{host}"
    for found in Path("/sys/fs/cgroup").glob(f"**/{group}/cpu.stat"):
        counts = dict(line.split() for line in found.read_text().splitlines())
        return int(counts["nr_throttled"])
    return 0


@pytest.mark.parametrize("cores", ["0", "-1", "half", "0.0001"])
def test_what_is_no_number_of_cores_is_refused(three, cores):
    refused = three.run("cores", cores)
    assert refused.returncode == 2 and "is not a number of cores from 0.001 to 1000, or none" in refused.stdout


def test_a_crash_ends_every_process_and_boot_brings_the_host_back(three):
    running = [
        three.start("exec", 2, "sh", "-c", "echo started; sleep 1000"),
        three.start("exec", 1, "ssh", "host2", "echo started; trap '' TERM HUP; sleep 1000"),
    ]
    for process in running:
        assert process.stdout.readline() == "started\n"
    space = three("exec", 2, "readlink", "/proc/self/ns/pid").strip()
    assert len(processes_in(space)) >= 5
    three("crash", 2)
    assert wait_until(lambda: not processes_in(space)), processes_in(space)
    for process in running:
        assert process.wait(300) != 0
        process.stdout.close()
    refused = three.run("exec", 2, "true")
    assert refused.returncode == 1 and "boot 2" in refused.stdout
    assert three.run("exec", 1, "ssh", "-o", "ConnectTimeout=5", "host2", "true").returncode == 255
    three("boot", 2)
    assert three("exec", 1, "ssh", "host2", "hostname") == "host2\n"
    assert "sleep" not in three("exec", 2, "ps", "-A", "-o", "comm=")


def processes_in(space: str) -> list[str]:
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            if os.readlink(link) == space:
                found.append(link.parts[2])
        except OSError:  # it has just ended
            continue
    return found


WAIT_FOR_THE_END = """
import socket, sys
connection = socket.create_connection(("host2", 5000))
connection.settimeout(float(sys.argv[1]))
print("connected", flush=True)
try:
    print("ended" if connection.recv(1) == b"" else "data")
except TimeoutError:
    print("nothing")
"""


@pytest.mark.parametrize("option, patience, noticed", [((), 300, "ended"), (("--silent",), 3, "nothing")])
def test_a_silent_crash_says_no_farewell(three, option, patience, noticed):
    server = three.start("exec", 2, sys.executable, HERE / "transfer.py", "receive")
    assert server.stdout.readline() == "ready\n"
    client = three.start("exec", 1, sys.executable, "-c", WAIT_FOR_THE_END, patience)
    assert client.stdout.readline() == "connected\n"
    three("crash", *option, 2)
    assert client.communicate(timeout=300)[0] == f"{noticed}\n"
    server.communicate(timeout=300)
    three("boot", 2)
    assert three("exec", 1, "ssh", "host2", "hostname") == "host2\n"


def test_two_sets_of_hosts_do_not_meet(three):
    with Hosts("tests-too", 1, "none") as other:
        assert other("exec", 1, "cat", "/etc/hosts").count("host") == 2  # localhost and host1
        assert other.run("exec", 2, "true").returncode == 1
        assert other.run("exec", 1, "timeout", "2", "bash", "-c", "</dev/tcp/10.77.0.2/22").returncode != 0
        assert len(other.bytes()) == 1 and len(three.bytes()) == 3
    assert not namespaces("tests-too")
    assert three("exec", 2, "hostname") == "host2\n"


def test_hosts_that_are_up_are_not_replaced(three):
    refused = three.run("up", 2, "none")
    assert refused.returncode == 1 and "3 hosts are up" in refused.stdout and "down" in refused.stdout
    assert three("exec", 3, "hostname") == "host3\n"

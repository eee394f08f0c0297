"""Calling mpirun/hosts as a user does."""

import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "mpirun" / "hosts"
CANNOT = 3  # the script's exit status where the machine or the user can't make hosts
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
}
ENVIRONMENT.pop("GRACE_EXT_HOSTS", None)


def hosts(*arguments, check=False, timeout=900, **options) -> subprocess.CompletedProcess:
    """Run the script to its end; standard output and error together. On a time-out it and its command are ended."""
    with start(*arguments, **options) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=300)
            raise TimeoutError(f"{' '.join(process.args)} did not end within {timeout} s; its output:\n{output}") from None
    assert not check or process.returncode == 0, output
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start(*arguments, stdin=subprocess.DEVNULL, env=ENVIRONMENT, cwd=None) -> subprocess.Popen:
    return subprocess.Popen(
        [str(SCRIPT), *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=cwd,
    )


class Hosts:
    """Hosts that are up inside `with`."""

    def __init__(self, name: str, count: int, rate: str):
        self.name, self.count, self.rate = name, count, rate

    def __enter__(self):
        self("up", self.count, self.rate)
        return self

    def __exit__(self, *_):
        self("down")

    def __call__(self, *arguments, check=True, **options) -> str:
        """A subcommand's output."""
        return self.run(*arguments, check=check, **options).stdout

    def run(self, *arguments, **options) -> subprocess.CompletedProcess:
        return hosts("--name", self.name, *arguments, **options)

    def start(self, *arguments, **options) -> subprocess.Popen:
        return start("--name", self.name, *arguments, **options)

    def bytes(self) -> dict:
        """{"host1": {"rx": int, "tx": int}, ...}"""
        rows = (line.split() for line in self("bytes").splitlines())
        return {row[0]: {row[1]: int(row[2]), row[3]: int(row[4])} for row in rows}


def id_of(name: str) -> str:
    """What the names of namespaces begin with; other checkouts have others."""
    loader = importlib.machinery.SourceFileLoader("mpirun_hosts", str(SCRIPT))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.path.append(str(SCRIPT.parent))  # it imports from there
    try:
        loader.exec_module(script)
    finally:
        sys.path.pop()
    return script.Hosts(name).id


def wait_until(condition, seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def namespaces(name: str = "tests") -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{id_of(name)}.")]


def state_of(name: str = "tests") -> Path:
    return Path("/run") / id_of(name)

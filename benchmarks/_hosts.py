"""Virtual hosts on this machine, created as the tests create them, and jobs on them."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

from _lib import ROOT

_spec = importlib.util.spec_from_file_location("hosts_of_tests", os.path.join(ROOT, "tests", "support", "hosts.py"))
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
Hosts, wait_until = _module.Hosts, _module.wait_until

#: For more ranks than cores. Without warnings, grace_ext does not probe the link, so that no such allreduce is counted.
ENVIRONMENT = {
    **_module.ENVIRONMENT,
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "GRACE_EXT_WARN": "0",
    "PYTHONUNBUFFERED": "1",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "29500",
    "GLOO_SOCKET_IFNAME": "eth0",
}
#: Of grace_ext on Horovod: Horovod's thread leaves the cores to the ranks, and containers go by Gloo (docs/training.md).
OUR_ENVIRONMENT = {"HOROVOD_CYCLE_TIME": "50"}
_PASSED_ON = [
    name
    for name in (
        "PATH",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "GRACE_EXT_CACHE",
        "GRACE_EXT_WARN",
        "OMP_NUM_THREADS",
        "TF_CPP_MIN_LOG_LEVEL",
    )
    if name in ENVIRONMENT
]
_GLOO = ["horovodrun", "--gloo", "--network-interfaces", "eth0", "--start-timeout", "120"]
_MPIRUN = ["mpirun", "--map-by", "slot", "--bind-to", "none", "--mca", "btl_tcp_if_include", "eth0"]
_RING = ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4"]
_NAMES = [word for name in _PASSED_ON for word in ("-x", name)]
LAUNCHERS = {"horovodrun --gloo": _GLOO, "mpirun": [*_MPIRUN, *_NAMES], "mpirun, ring": [*_MPIRUN, *_RING, *_NAMES]}


class JobFailed(Exception):
    """A job failed; the message has the end of its output."""


class Job:
    """A Python program with per_host ranks on each of the first hosts.

    launcher: one of LAUNCHERS, or "torchrun": one rank on each host, started with the variables that torchrun sets. env:
    variables in addition to ENVIRONMENT, for all ranks.
    """

    def __init__(self, up: Hosts, launcher: str, ranks: int, program: list[str], env: dict | None = None, per_host: int = 1):
        passed_on = [word for name in env or {} for word in ("-x", name)] if launcher.startswith("mpirun") else []
        env = {**ENVIRONMENT, **(env or {})}
        program = [sys.executable, *program]
        if launcher == "torchrun":
            commands = [(rank + 1, ["env", f"RANK={rank}", f"WORLD_SIZE={ranks}", *program]) for rank in range(ranks)]
        else:
            names = ",".join(f"host{host}:{per_host}" for host in range(1, ranks // per_host + 1))
            commands = [(1, [*LAUNCHERS[launcher], *passed_on, "-np", ranks, "-H", names, *program])]
        self.started = time.time()
        self.processes = [up.start("exec", host, *command, env=env) for host, command in commands]

    def has_ended(self) -> bool:
        """Whether a process of the job has ended."""
        return any(process.poll() is not None for process in self.processes)

    def end(self, timeout: float) -> str:
        """Wait for the job, and return its output. Raises JobFailed if it does not end in time, or not with status 0."""
        deadline = time.monotonic() + timeout
        output, late = "", False
        for process in self.processes:
            try:
                output += process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                late = True
                break
        if late or any(process.returncode for process in self.processes):
            output += self.stop()
            how = f"did not end within {timeout:.0f} s" if late else "failed"
            raise JobFailed(f"the job {how}; the end of its output:\n{output[-4000:]}")
        return output

    def stop(self) -> str:
        """Stop the job, and return the rest of its output."""
        output = ""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(number)
            for process in self.processes:
                try:
                    output += process.communicate(timeout=10)[0] if not process.stdout.closed else ""
                except subprocess.TimeoutExpired:
                    continue
        return output

"""Start examples on several ranks, and read what they have logged. The comparisons and the benchmarks use it."""

import collections
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "pytorch_fashion_mnist.py")
#: Variables for more ranks than cores: a rank that waits yields its core, and matrix products run on one thread.
SHARED_CORES = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
_RANK_TAG = re.compile(rb"\[\d+,\d+\]<std(out|err)>: ?")  # mpirun puts it before each line
# TensorFlow prints these whatever is set; horovodrun imports TensorFlow where it is installed, so it prints them too.
_NOTICE = re.compile(rb"WARNING: All log messages before absl|I0000 .*oneDNN custom operations are on")


class RunFailed(Exception):
    """A run ended with an error or took too long; the message shows the end of its output."""


@dataclasses.dataclass
class Run:
    """A finished training. history: what the example logged, one dict per evaluation."""

    label: str
    history: list[dict]

    @property
    def last(self) -> dict:
        return self.history[-1]

    @property
    def seconds(self) -> dict[str, float]:
        """Mean seconds per step of compute, codec and exchange."""
        return self.last["seconds_per_step"]

    @property
    def bytes_per_step(self) -> float:
        return self.last["bytes_sent"] / self.last["steps"]


def train(
    label: str,
    options: list[str],
    log_file: str,
    ranks: int,
    timeout: float,
    example: str = EXAMPLE,
    env: dict[str, str] | None = None,
    launcher=None,
) -> Run:
    """Run an example under horovodrun or another launcher, and read its log. Raises RunFailed."""
    if os.path.exists(log_file):
        os.remove(log_file)
    command = [*(launcher or horovodrun)(ranks), example, *options, "--log-file", os.path.abspath(log_file)]
    finish(label, command, timeout, env)
    with open(log_file) as log:
        return Run(label, [json.loads(line) for line in log])


def horovodrun(ranks: int) -> list[str]:
    """Return the command that starts a script on this many ranks, up to the script. Raises RunFailed."""
    launcher = shutil.which("horovodrun", path=os.path.dirname(sys.executable)) or shutil.which("horovodrun")
    if launcher is None:
        raise RunFailed("horovodrun was not found; `make setup` installs it, then `. mpirun/env.sh` finds it")
    return [launcher, "-np", str(ranks), "--start-timeout", "120", sys.executable]


def torchrun(ranks: int) -> list[str]:
    """Return the same for PyTorch's own launcher."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def finish(label: str, command: list[str], timeout: float, env: dict[str, str] | None = None) -> None:
    """Run a command to its end, and show its progress on this terminal. Raises RunFailed.

    env: variables to set in addition to those of this process.
    """
    status, lines = _run(command, timeout, env or {})
    if status != 0:
        how = f"did not end within {timeout:.0f} seconds" if status is None else f"ended with status {status}"
        tail = "\n".join(f"    {line}" for line in lines)
        raise RunFailed(f"the run {label!r} {how}; the end of its output:\n{tail}\nthe command:\n    " + " ".join(command))


def _run(command: list[str], timeout: float, env: dict[str, str]):
    """Return the exit status, None if the time was up, and the last lines of the output."""
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **env}
    env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env.get("PATH", "")
    if not sys.stderr.isatty():
        env.setdefault("TQDM_MININTERVAL", "10")  # in a file, each update of the bar is a line
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    late = threading.Event()
    timer = threading.Timer(timeout, lambda: (late.set(), _stop(child)))
    timer.start()
    try:
        lines = _pass_on(child.stdout)
        status = child.wait()
    finally:
        timer.cancel()
        _stop(child)
    return (None if late.is_set() else status), lines


def _pass_on(stream) -> list[str]:
    """Copy bytes to the terminal, and return the last lines.

    mpirun's tags and TensorFlow's notices are left out of both, progress bars of the lines.
    """
    lines, rest = collections.deque(maxlen=30), b""
    while block := os.read(stream.fileno(), 65536):
        *parts, rest = re.split(rb"(?<=[\r\n])", rest + block)
        for part in parts:
            part = _RANK_TAG.sub(b"", part)
            if _NOTICE.match(part):
                continue
            sys.stderr.buffer.write(part)
            if part.endswith(b"\n") and part.strip():
                lines.append(part.decode(errors="replace").rstrip())
        sys.stderr.buffer.flush()
    if rest.strip():  # an unfinished progress bar
        sys.stderr.buffer.write(rest + b"\n")
        sys.stderr.buffer.flush()
        lines.append(rest.decode(errors="replace").strip())
    return list(lines)


def _stop(child) -> None:
    """Terminate the launcher, which terminates the ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                continue

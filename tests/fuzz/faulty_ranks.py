"""Faults at random points of real jobs: the job ends by itself and names the rank, or goes on where that is promised.

python tests/fuzz/faulty_ranks.py --seed 7
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from fuzzing import Found

WORKER = Path(__file__).parent / "faulty_ranks_worker.py"
sys.path.append(str(Path(__file__).parents[1]))  # where this is run as a script

from support.launch import OPEN_MPI_FOLDER, environment  # noqa: E402

#: Seconds after its fault in which a job has to be over; and after which a stopped rank is killed, None for the default. A
#: run on a machine that does nothing else takes 60 s and the default.
LIMIT, STOPPED = 600.0, 5.0
BEGINS = 1200.0  # seconds in which a fault has to come, on however slow a machine
_LOOK, _LAST = 0.05, 30.0  # seconds between two looks at a job, and in which what is left of one has to go
_VARIABLE = "GRACE_EXT_FAULT"  # marks all processes of a job

COMMANDS = {
    "mpirun": "mpirun -np {0} --oversubscribe",
    "horovodrun --mpi": "horovodrun --mpi -np {0} -H localhost:{0}",
    "horovodrun --gloo": "horovodrun --gloo -np {0} -H localhost:{0}",
    "torchrun": "torchrun --standalone --nproc-per-node {0} --no-python",
}
_OPEN_MPI = r"process rank {0} with PID|Process name:[^\n]*,{0}\]"
#: What a launcher says of the rank that made it end the job.
NAMED = {
    "mpirun": _OPEN_MPI,
    "horovodrun --mpi": _OPEN_MPI,
    "horovodrun --gloo": r"Process name: {0}\n",
    "torchrun": r"Root Cause[^=]*rank +: {0} ",
}
#: What the rank itself says, or another one of it.
SAID = {"exception": "rank {0} gives up", "stop": "a signal stopped rank {0} "}
LEFT = r"fails because of others; on this host, [^\n]*rank {0} is "
POINTS = ("user", "backward", "hook", "worker", "between", "decode", "callback", "exit")
KINDS = ("exception", "exit", "leave", "kill", "stop", "pause")
SPECS = ("topk:0.1/rice/qsgd:7", "dense/minmax", "randomk:0.1", "powersgd:2", "dense/fp16", "topk:0.05/auto/raw")


@dataclasses.dataclass(frozen=True)
class Fault:
    """ranks: those it strikes. point: see faulty_ranks_worker. number: at which call of the step, where a point is passed
    several times. kind "leave" is sys.exit(0), "pause" a stop until all ranks have been stopped for longer than one may
    be."""

    adapter: str
    launcher: str
    size: int
    compression: str
    memory: str
    communicator: str
    kind: str
    ranks: tuple[int, ...]
    point: str
    step: int
    number: int

    @property
    def goes_on(self) -> bool:
        """A job that is suspended as a whole, and one whose observer fails."""
        return self.kind == "pause" or (self.kind == "exception" and self.point == "callback")


def draw(seed: int) -> Fault:
    pick = random.Random(seed)
    adapter = pick.choices(("horovod_torch", "ddp", "keras"), (6, 3, 1))[0]
    launcher = "torchrun" if adapter == "ddp" else pick.choice([name for name in COMMANDS if name != "torchrun"])
    size = pick.choice((2, 2, 3, 4)) if adapter != "keras" else 2
    compression = pick.choice(SPECS)
    communicator = _communicator(pick, adapter, compression)
    memory = pick.choice(("residual", "none", "ef21"))
    if memory == "ef21" and (communicator != "allgather" or compression == "powersgd:2"):
        memory = "residual"  # it adds up containers
    kind = pick.choices(KINDS, (3, 2, 1, 3, 4, 1))[0]
    point = pick.choice(_points(adapter, kind))
    ranks = tuple(sorted(pick.sample(range(size), _struck(pick, kind, size))))
    step = pick.randrange(1 if adapter == "keras" else 0, 7)  # in TensorFlow ranks know each other from the first step on
    return Fault(adapter, launcher, size, compression, memory, communicator, kind, ranks, point, step, pick.randrange(4))


def _communicator(pick: random.Random, adapter: str, compression: str) -> str:
    if compression in ("randomk:0.1", "dense/fp16"):
        return pick.choice(("allreduce", "allgather"))
    several = ("allgather", "sharded", "tree", "hierarchical") if compression != "powersgd:2" else ("allgather",)
    return pick.choice(several if adapter == "ddp" else (*several, "auto"))


def _points(adapter: str, kind: str) -> tuple[str, ...]:
    """Where a fault of this kind can be. Python takes no notice of what is raised at exit. A rank that is stopped at exit is
    left behind by the others where they do not wait for it, as Horovod's do."""
    points = tuple(point for point in POINTS if not (adapter == "keras" and point == "backward"))
    at_exit = kind == "kill" or (kind in ("stop", "pause") and adapter != "ddp")
    return points if at_exit else points[:-1]


def _struck(pick: random.Random, kind: str, size: int) -> int:
    """How many ranks. Those that are stopped need one to see it, unless that is all; who leaves, one to miss it."""
    if kind == "pause":
        return size
    return pick.randint(1, size - 1 if kind in ("stop", "leave") else size)


def batch(seed: int) -> collections.Counter:
    """Raises Found."""
    try:
        return collections.Counter({run(draw(seed)): 1})
    except AssertionError as error:
        repeat = shlex.join(["python", "tests/fuzz/faulty_ranks.py", "--seed", str(seed)])
        raise Found(f"{repeat}\n{draw(seed)}\n{error}") from None


def run(fault: Fault) -> str:
    """Starts the job -> "ended" or "went on". Raises AssertionError if it did neither as it should."""
    job = str(uuid.uuid4())
    variables = {**environment(), _VARIABLE: job}
    if fault.kind == "pause":
        variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "600"  # Gloo's seconds go on while a job is stopped
    if STOPPED is not None:
        variables["GRACE_EXT_STOPPED_SECONDS"] = str(STOPPED)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        variables[OPEN_MPI_FOLDER] = folder
        command = [
            *COMMANDS[fault.launcher].format(fault.size).split(),
            sys.executable,
            str(WORKER),
            folder,
            json.dumps(dataclasses.asdict(fault)),
        ]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables, start_new_session=True
        )
        try:
            over = _follow(fault, process, Path(folder), job)
            left = _wait_until(lambda: not _processes(job), _LAST)
        finally:
            for pid in _processes(job):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()
        assert over is None, f"{over}\n{said[-20000:]}"
        assert left, f"processes of the job are left\n{said[-20000:]}"
        _check(fault, process.returncode, said)
    return "went on" if fault.goes_on else "ended"


def _follow(fault: Fault, process: subprocess.Popen, folder: Path, job: str) -> str | None:
    """Until it is over -> None, or what is wrong with that."""

    def struck():
        return len(list(folder.glob("struck-*")))

    expected = len(fault.ranks) if fault.kind == "pause" else 1
    if not _wait_until(lambda: struck() >= expected or process.poll() is not None, BEGINS):
        _tell_where(job)
        return f"no fault within {BEGINS} s"
    if not struck():
        return "ended before its fault"
    if fault.kind == "pause":
        _continue(fault, folder, job)
    if not _wait_until(lambda: process.poll() is not None, LIMIT):
        _tell_where(job)
        return f"went on for {LIMIT} s after the fault"
    return None


def _continue(fault: Fault, folder: Path, job: str) -> None:
    """All ranks are about to stop. When that is long enough ago, they are continued."""
    time.sleep(1.5 * (STOPPED or 20.0))
    for pid in _processes(job):
        os.kill(pid, signal.SIGCONT)


def _check(fault: Fault, status: int, said: str) -> None:
    reached = len(re.findall("trained to the end", said))
    if fault.goes_on:
        assert status == 0 and reached == fault.size, f"status {status}, {reached} ranks trained to the end\n{said[-20000:]}"
        return
    assert status != 0, f"status 0\n{said[-20000:]}"
    patterns = [NAMED[fault.launcher], LEFT, *filter(None, [SAID.get(fault.kind)])]
    assert any(re.search(pattern.format(rank), said) for pattern in patterns for rank in fault.ranks), (
        f"none of the ranks {fault.ranks} is named\n{said[-20000:]}"
    )


def _tell_where(job: str) -> None:
    """The ranks print where their threads stand."""
    for pid in _processes(job):
        with contextlib.suppress(OSError):
            if b"faulty_ranks_worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1]:
                os.kill(pid, signal.SIGUSR1)
    time.sleep(2)


def _processes(job: str) -> list[int]:
    """All that have the job's mark, zombies left out."""
    found, mark = [], f"{_VARIABLE}={job}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return True


def main() -> None:
    global LIMIT, STOPPED
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after its fault in which the job has to be over")
    parser.add_argument("--stopped", type=float, default=STOPPED, help="seconds after which a stopped rank is killed")
    options = parser.parse_args()
    LIMIT, STOPPED = options.limit, options.stopped
    print(draw(options.seed), flush=True)
    print(dict(batch(options.seed)))


if __name__ == "__main__":
    main()

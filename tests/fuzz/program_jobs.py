"""Programs drawn at random, in the ranks of one job."""

import collections
import tempfile
from pathlib import Path

from fuzzing import Found
from support import launch

HERE = Path(__file__).parent

#: Kinds of programs by how their ranks are started, and how many run in one job.
JOBS = (
    ("horovod", "mpirun-2", 50),
    ("horovod", "mpirun-4", 30),
    ("ddp", "torchrun-2", 50),
    ("ddp", "torchrun-4", 30),
    ("horovod", "horovodrun-gloo-2", 50),
    ("tensorflow", "mpirun-2", 12),
    ("ddp", "torchrun-2", 50),
    ("horovod", "mpirun-2", 50),
    ("tensorflow", "horovodrun-gloo-4", 8),
)


def batch(seed: int) -> collections.Counter:
    """What came of the programs of a job, by kind. Raises Found."""
    kind, launcher, count = JOBS[seed % len(JOBS)]
    return run(kind, launcher, 1000 * seed, count)


def run(kind: str, launcher: str, first: int, count: int) -> collections.Counter:
    """Programs from the seed `first` on."""
    with tempfile.TemporaryDirectory() as folder:
        running, tried, found = (Path(folder, name) for name in ("running.py", "tried", "found.py"))
        try:
            job = launch.run(launcher, HERE / "programs_worker.py", kind, folder, str(first), str(count))
        except AssertionError as error:  # it took so long that it is taken to hang
            raise Found(f"# {launcher}\n{_as_comment(str(error))}\n{_text(running)}") from None
        if found.exists():
            raise Found(f"# {launcher}\n{_text(found)}")
        if int(_text(tried) or 0) != count:
            raise Found(f"# {launcher}, status {job.returncode}\n{_as_comment(job.stdout[-4000:])}\n{_text(running)}")
    return collections.Counter({f"{kind}: no difference": count})


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _as_comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines())

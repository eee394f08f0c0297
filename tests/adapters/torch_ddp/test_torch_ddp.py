"""The hook for DistributedDataParallel under torchrun, over Gloo. The checks are in checks_*.py and run in the ranks."""

import itertools
import re
from pathlib import Path

import pytest
from support.launch import TORCHRUN, checks_in, in_tiers, of_jobs, run, start_job

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi

CHECKS = checks_in(*sorted(HERE.glob("checks_*.py")))


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, others=("torchrun-4",), launchers=TORCHRUN)
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)


FAILURES = {
    "user": "rank 1 gives up",
    "worker": "the encoder of rank 1 broke",
    "caught": "the ranks may be out of step",
    "late": "(?i)timed? ?out",
}


@pytest.mark.parametrize(
    "launcher, where",
    in_tiers(
        [*itertools.product(("torchrun-2",), FAILURES), ("torchrun-4", "user"), ("torchrun-4", "worker")],
        test=[("torchrun-4", "user"), ("torchrun-2", "worker"), ("torchrun-2", "caught"), ("torchrun-2", "late")],
    ),
)
def test_a_rank_that_fails_ends_the_job(launcher, where):
    done = run(launcher, HERE / "failing.py", where)
    assert done.returncode != 0
    assert re.search(FAILURES[where], done.stdout), done.stdout[-4000:]
    assert "step 4 went well" in done.stdout and "step 5 went well" not in done.stdout
    assert "this line must not be reached" not in done.stdout


@pytest.mark.alone
@pytest.mark.tier("test")
def test_containers_are_those_of_horovod(tmp_path):
    pytest.importorskip("horovod")
    for launcher, framework in (("torchrun-2", "ddp"), ("mpirun-2", "horovod")):
        done = run(launcher, HERE / "containers.py", framework, str(tmp_path))
        assert done.returncode == 0, done.stdout[-4000:]
    for rank in range(2):
        ours, theirs = (sorted((tmp_path / f"{framework}{rank}").iterdir()) for framework in ("ddp", "horovod"))
        assert [file.name for file in ours] == [file.name for file in theirs] and len(ours) >= 12
        for one, other in zip(ours, theirs, strict=True):
            assert one.read_bytes() == other.read_bytes(), f"rank {rank}: {one.name}"

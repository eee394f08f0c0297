"""Local steps in real ranks, over torch.distributed and over Horovod. The checks are in checks_*.py and run in the ranks."""

import itertools
import re
from pathlib import Path

import pytest
from support.launch import LAUNCHERS, TORCHRUN, checks_in, in_tiers, of_jobs, run, skip_without, start_job

skip_without("torch", "horovod")

HERE = Path(__file__).parent
pytestmark = [pytest.mark.mpi, pytest.mark.tier("test")]

CHECKS = checks_in(*sorted(HERE.glob("checks_*.py")))
BOTH = {name: command for name, command in {**TORCHRUN, **LAUNCHERS}.items() if "mpi-" not in name}


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, others=("torchrun-4", "horovodrun-gloo-4"), launchers=BOTH)
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)


FAILURES = {
    "between": "rank 1 gives up",
    "under way": "rank 1 gives up",
    "worker": "the encoder of rank 1 broke",
    "stopped": "a signal stopped rank 1 .* is killed",
}


@pytest.mark.parametrize(
    "launcher, where",
    in_tiers(
        [*itertools.product(("torchrun-2", "horovodrun-gloo-2"), FAILURES), ("mpirun-2", "stopped")],
        test=[("torchrun-2", "under way"), ("torchrun-2", "stopped"), ("horovodrun-gloo-2", "worker")],
    ),
)
def test_a_rank_that_fails_ends_the_job(launcher, where):
    done = run(launcher, HERE / "failing.py", where, variables={"GRACE_EXT_STOPPED_SECONDS": "5"})
    assert done.returncode != 0
    assert re.search(FAILURES[where], done.stdout), done.stdout[-4000:]
    assert "step 7 went well" in done.stdout and "this line must not be reached" not in done.stdout

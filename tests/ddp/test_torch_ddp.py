"""The hook for DistributedDataParallel under torchrun, over Gloo. The checks are in checks_ddp*.py and run in the ranks."""

import re

import pytest
from launch import TORCHRUN, assert_ended_well, assert_ok, checks_in, run, run_worker

pytestmark = pytest.mark.mpi

CHECKS = checks_in(*(f"../ddp/checks_ddp{part}.py" for part in ("", "_auto", "_loop", "_summing", "_state")))


@pytest.fixture(scope="module", params=TORCHRUN)
def job(request, tmp_path_factory):
    """Run all checks once under a launcher: results by rank, and the process."""
    return run_worker(request.param, "../ddp/worker_ddp.py", tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", CHECKS)
def test_check(job, name):
    assert_ok(job, name)


def test_job_ends_well(job):
    assert_ended_well(job, CHECKS)


@pytest.mark.parametrize("launcher, where, text", [
    ("torchrun-2", "user", "rank 1 gives up"),
    ("torchrun-4", "user", "rank 1 gives up"),
    ("torchrun-2", "worker", "the encoder of rank 1 broke"),
    ("torchrun-4", "worker", "the encoder of rank 1 broke"),
    ("torchrun-2", "caught", "the ranks may be out of step"),
    ("torchrun-2", "late", "(?i)timed? ?out"),
])
def test_a_rank_that_fails_ends_the_job(launcher, where, text):
    done = run(launcher, "../ddp/failing_ddp.py", where, timeout=200)
    assert done.returncode != 0
    assert re.search(text, done.stdout), done.stdout[-4000:]
    assert "this line must not be reached" not in done.stdout

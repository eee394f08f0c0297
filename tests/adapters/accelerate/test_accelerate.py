"""Models that Accelerate prepares, under torchrun. The checks are in checks_accelerate.py and run in the ranks."""

from pathlib import Path

import pytest
from support.launch import TORCHRUN, checks_in, of_jobs, run, skip_without, start_job

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi
skip_without("torch", "accelerate")

CHECKS = checks_in(*sorted(HERE.glob("checks_*.py")))


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, launchers=TORCHRUN)
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)


@pytest.mark.alone
@pytest.mark.tier("test")
def test_processes_that_do_not_know_of_each_other_are_refused():
    done = run("torchrun-2", HERE / "apart.py", variables={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    assert "the launcher started 2 processes, but Accelerate uses none but this one" in done.stdout
    assert "this line must not be reached" not in done.stdout

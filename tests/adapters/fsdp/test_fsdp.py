"""Models that fully_shard has sharded, under torchrun. The checks are in checks_*.py and run in the ranks."""

from pathlib import Path

import pytest
from support.launch import TORCHRUN, checks_in, of_jobs, start_job

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

"""Local steps under Keras. The checks are in checks_keras_rounds.py and run in the ranks."""

from pathlib import Path

import pytest
from support.launch import checks_in, of_jobs, skip_without, start_job

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi
skip_without("tensorflow", "horovod", "tf_keras")

CHECKS = checks_in(*sorted(HERE.glob("checks_*.py")))


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, launchers=("mpirun-2", "horovodrun-gloo-4"))
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)

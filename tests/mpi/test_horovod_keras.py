"""Keras under real launchers. The checks themselves are in checks_keras*.py and run inside the ranks."""

import pytest
from launch import assert_ended_well, assert_ok, checks_in, run_worker

pytestmark = pytest.mark.mpi
pytest.importorskip("horovod.tensorflow")
pytest.importorskip("tf_keras")

CHECKS = checks_in("checks_keras.py", "checks_keras_memory.py")


# Tracing Keras' functions takes minutes in all, so not under every launcher: those differ below Keras.
@pytest.fixture(scope="module", params=["mpirun-2", "horovodrun-gloo-4"])
def job(request, tmp_path_factory):
    """Run all checks once under a launcher: results by rank, and the process."""
    return run_worker(request.param, "worker_keras.py", tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", CHECKS)
def test_check(job, name):
    assert_ok(job, name)


def test_job_ends_well(job):
    assert_ended_well(job, CHECKS)

"""The TensorFlow adapter under real launchers. The checks themselves are in checks_*.py and run inside the ranks."""

import pytest
from launch import LAUNCHERS, assert_ended_well, assert_ok, checks_in, run, run_worker

pytestmark = pytest.mark.mpi
pytest.importorskip("horovod.tensorflow")

CHECKS = checks_in("checks_observe_tensorflow.py", "checks_tensorflow.py", "checks_tensorflow_auto.py",
                   "checks_tensorflow_graphs.py", "checks_tensorflow_memory.py", "checks_tensorflow_rows.py")


@pytest.fixture(scope="module", params=LAUNCHERS)
def job(request, tmp_path_factory):
    """Run all checks once under a launcher: results by rank, and the process."""
    return run_worker(request.param, "worker_tensorflow.py", tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", CHECKS)
def test_check(job, name):
    assert_ok(job, name)


def test_job_ends_well(job):
    assert_ended_well(job, CHECKS)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_raises_ends_the_job(launcher):
    where = "exchange" if launcher.endswith("2") else "user"
    done = run(launcher, "failing_tensorflow.py", where, timeout=120)
    assert done.returncode != 0
    assert ("TypeError" if where == "exchange" else "rank 1 gives up") in done.stdout
    assert "this line must not be reached" not in done.stdout


def test_containers_are_those_of_the_pytorch_adapter(tmp_path):
    for framework in ("torch", "tensorflow"):
        done = run("mpirun-2", "containers.py", framework, str(tmp_path), timeout=120)
        assert done.returncode == 0, done.stdout[-4000:]
    for rank in range(2):
        ours, theirs = (sorted((tmp_path / f"{framework}{rank}").iterdir()) for framework in ("tensorflow", "torch"))
        assert [file.name for file in ours] == [file.name for file in theirs] and len(ours) > 10
        for one, other in zip(ours, theirs, strict=True):
            assert one.read_bytes() == other.read_bytes(), f"rank {rank}: {one.name}"

"""The TensorFlow adapter under real launchers. The checks themselves are in checks_*.py and run inside the ranks."""

from pathlib import Path

import pytest
from support.launch import LAUNCHERS, checks_in, in_tiers, of_jobs, run, skip_without, start_job

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi
skip_without("tensorflow", "horovod")

CHECKS = checks_in(*(path for path in sorted(HERE.glob("checks_*.py")) if "keras" not in path.stem))


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, others=("horovodrun-gloo-2", "horovodrun-mpi-4"))
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)


@pytest.mark.parametrize(
    "launcher, where",
    in_tiers(
        ((launcher, "exchange" if launcher.endswith("2") else "user") for launcher in LAUNCHERS),
        test=[("mpirun-2", "exchange"), ("horovodrun-gloo-4", "user")],
    ),
)
def test_a_rank_that_raises_ends_the_job(launcher, where):
    done = run(launcher, HERE / "failing.py", where)
    assert done.returncode != 0
    assert ("TypeError" if where == "exchange" else "rank 1 gives up") in done.stdout
    assert "this line must not be reached" not in done.stdout


@pytest.mark.alone
@pytest.mark.tier("test")
def test_containers_are_those_of_the_pytorch_adapter(tmp_path):
    for framework in ("torch", "tensorflow"):
        done = run("mpirun-2", HERE / "containers.py", framework, str(tmp_path))
        assert done.returncode == 0, done.stdout[-4000:]
    for rank in range(2):
        ours, theirs = (sorted((tmp_path / f"{framework}{rank}").iterdir()) for framework in ("tensorflow", "torch"))
        assert [file.name for file in ours] == [file.name for file in theirs] and len(ours) > 10
        for one, other in zip(ours, theirs, strict=True):
            assert one.read_bytes() == other.read_bytes(), f"rank {rank}: {one.name}"

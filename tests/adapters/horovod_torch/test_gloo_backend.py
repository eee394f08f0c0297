"""The PyTorch adapter with containers over a group of PyTorch's Gloo. Beside checks_gloo_backend.py, which test_horovod_torch.py
runs, the checks of other launchers' differences run with it."""

from pathlib import Path

import pytest
from support.launch import LAUNCHERS, checks_in, in_tiers, of_jobs, run, start_job

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi

CHECKS = [name for name, matters in checks_in(*sorted(HERE.glob("checks_*.py"))).items() if matters]


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py", "gloo")


@of_jobs(dict.fromkeys(CHECKS, True), others=("horovodrun-gloo-4",))
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)


@pytest.mark.parametrize(
    "launcher, where",
    in_tiers(
        [(launcher, where) for launcher in LAUNCHERS for where in ("user", "worker", "stuck")],
        test=[("mpirun-4", "user"), ("horovodrun-gloo-2", "worker"), ("mpirun-2", "stuck")],
    ),
)
def test_a_rank_that_raises_ends_the_job(launcher, where):
    variables = {"GRACE_EXT_STOPPED_SECONDS": "0"} if where == "stuck" else {}
    done = run(launcher, HERE / "failing.py", where, "gloo", timeout=400, variables=variables)
    assert done.returncode != 0
    assert ("TypeError" if where == "worker" else "rank 1 gives up") in done.stdout
    assert "this line must not be reached" not in done.stdout

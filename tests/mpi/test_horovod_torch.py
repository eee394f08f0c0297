"""The PyTorch adapter under real launchers. The checks themselves are in checks*.py and run inside the ranks."""

import json

import pytest
from launch import LAUNCHERS, assert_ended_well, assert_ok, checks_in, run, run_worker

pytestmark = pytest.mark.mpi

CHECKS = checks_in(
    "checks.py",
    "checks_auto.py",
    "checks_batch_norm.py",
    "checks_corners.py",
    "checks_join.py",
    "checks_methods.py",
    "checks_observe.py",
    "checks_onebit.py",
    "checks_rows.py",
    "checks_summing.py",
    "checks_state.py",
)


@pytest.fixture(scope="module", params=LAUNCHERS)
def job(request, tmp_path_factory):
    """Run all checks once under a launcher: results by rank, and the process."""
    return run_worker(request.param, "worker.py", tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", CHECKS)
def test_check(job, name):
    assert_ok(job, name)


def test_job_ends_well(job):
    assert_ended_well(job, CHECKS)


@pytest.mark.parametrize("where", ["user", "worker", "stuck"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_raises_ends_the_job(launcher, where):
    done = run(launcher, "failing.py", where, timeout=60)
    assert done.returncode != 0
    assert ("TypeError" if where == "worker" else "rank 1 gives up") in done.stdout
    assert "this line must not be reached" not in done.stdout


def test_a_job_that_is_stopped_goes_on_where_it_was(tmp_path):
    results = {}
    for phase, launcher in (("first", "mpirun-4"), ("again", "mpirun-4"), ("other", "mpirun-2")):
        done = run(launcher, "resuming.py", str(tmp_path), phase, timeout=240)
        assert done.returncode == 0, done.stdout[-4000:]
        results[phase] = [json.loads(file.read_text()) for file in sorted(tmp_path.glob(f"{phase}-rank*.json"))]
    assert results["again"] == results["first"]
    old, new = len(results["first"]), len(results["other"])
    for result in results["other"]:
        assert result["ranks"] == list(range(old))
        assert result["off"] < 1e-6 < 1e-3 < result["largest"]
    (text,) = results["other"][0]["log"]
    assert text == f"INFO: the checkpoint is of {old} ranks, and there are {new} now: memories were redistributed"

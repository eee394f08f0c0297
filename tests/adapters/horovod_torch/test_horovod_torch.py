"""The PyTorch adapter under real launchers. The checks themselves are in checks_*.py and run inside the ranks."""

import itertools
import json
from pathlib import Path

import pytest
from support.launch import LAUNCHERS, checks_in, in_tiers, of_jobs, run, start_job

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi

CHECKS = checks_in(*sorted(HERE.glob("checks_*.py")))


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
        itertools.product(LAUNCHERS, ("user", "worker", "stuck")),
        test=[
            ("mpirun-2", "user"),
            ("horovodrun-gloo-2", "worker"),
            ("mpirun-4", "worker"),
            ("mpirun-2", "stuck"),
            ("horovodrun-gloo-2", "stuck"),
        ],
    ),
)
def test_a_rank_that_raises_ends_the_job(launcher, where):
    variables = {"GRACE_EXT_STOPPED_SECONDS": "0"} if where == "stuck" else {}  # nobody else is to end the job
    # Not for Open MPI's own patience, which is of ten minutes.
    done = run(launcher, HERE / "failing.py", where, timeout=400, variables=variables)
    assert done.returncode != 0
    assert ("TypeError" if where == "worker" else "rank 1 gives up") in done.stdout
    assert "this line must not be reached" not in done.stdout


@pytest.mark.parametrize(
    "launcher, who",
    in_tiers(itertools.product(LAUNCHERS, ("all", "first")), test=[("mpirun-2", "all"), ("mpirun-2", "first")]),
)
def test_an_exception_in_the_middle_of_backward_ends_the_job(launcher, who):
    done = run(launcher, HERE / "failing_backward.py", who, timeout=300)
    assert done.returncode != 0
    assert "backward gives up" in done.stdout
    assert "this line must not be reached" not in done.stdout


@pytest.mark.alone
@pytest.mark.tier("test")
def test_a_rank_can_leave_while_another_one_starts_collectives(tmp_path):
    """Where Horovod's thread needs Python's interpreter lock to let go of tensors, the two may wait for each other for ever.
    Found by tests/fuzz/faulty_ranks.py --seed 58."""
    done = run("mpirun-2", HERE / "leaving.py", str(tmp_path))
    assert done.returncode == 0 and "shut down without the interpreter lock" in done.stdout, done.stdout[-4000:]


@pytest.mark.parametrize("launcher", in_tiers(((launcher,) for launcher in LAUNCHERS), test=[("mpirun-2",)]))
def test_horovods_timeline_shows_our_phases(launcher, tmp_path):
    done = run(launcher, HERE / "timeline.py", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.alone
@pytest.mark.tier("test")
def test_a_job_that_is_stopped_goes_on_where_it_was(tmp_path):
    results = {}
    for phase, launcher in (("first", "mpirun-2"), ("again", "mpirun-2"), ("other", "mpirun-4")):
        done = run(launcher, HERE / "resuming.py", str(tmp_path), phase)
        assert done.returncode == 0, done.stdout[-4000:]
        results[phase] = [json.loads(file.read_text()) for file in sorted(tmp_path.glob(f"{phase}-rank*.json"))]
    assert results["again"] == results["first"]
    old, new = len(results["first"]), len(results["other"])
    for result in results["other"]:
        assert result["ranks"] == list(range(old))
        assert result["off"] < 1e-6 < 1e-3 < result["largest"]
    (text,) = results["other"][0]["log"]
    assert text == f"INFO: the checkpoint is of {old} ranks, and there are {new} now: memories were redistributed"

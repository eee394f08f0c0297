"""Gradients of JAX under mpirun. The checks are in checks_*.py and run in the ranks."""

import itertools
import re
from pathlib import Path

import pytest
from support.launch import LAUNCHERS, checks_in, in_tiers, of_jobs, run, skip_without, start_job

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi
skip_without("jax", "optax", "mpi4py")

CHECKS = checks_in(*sorted(HERE.glob("checks_*.py")))
MPIRUN = {name: command for name, command in LAUNCHERS.items() if name.startswith("mpirun")}


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, others=("mpirun-4",), launchers=MPIRUN)
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)


FAILURES = {
    "user": "RuntimeError: rank 1 gives up",
    "worker": "the encoder of rank 1 broke",
    "caught": "rank 1 ends after an exchange of gradients that failed: all ranks are ended",
    "unseen": "rank 1 ends after .* that failed.*: all ranks are ended",
    "early": r"ranks \[1\] have ended, and rank \d still waits for them: all make as many steps",
}


@pytest.mark.parametrize(
    "launcher, where",
    in_tiers(
        [*itertools.product(("mpirun-2",), FAILURES), ("mpirun-4", "user"), ("mpirun-4", "early")],
        test=[("mpirun-4", "user"), ("mpirun-2", "worker"), ("mpirun-2", "unseen"), ("mpirun-2", "early")],
    ),
)
def test_a_rank_that_fails_or_leaves_ends_the_job(launcher, where):
    done = run(launcher, HERE / "failing.py", where)
    assert done.returncode != 0
    assert re.search(FAILURES[where], done.stdout), done.stdout[-4000:]
    assert "step 4 went well" in done.stdout and "step 5 went well" not in done.stdout


@pytest.mark.alone
@pytest.mark.tier("test")
def test_nobody_need_wait_for_the_last_step():
    done = run("mpirun-2", HERE / "failing.py", "nowhere")
    assert done.returncode == 0 and done.stdout.count("all steps were begun") == 2, done.stdout[-4000:]


@pytest.mark.alone
@pytest.mark.tier("test")
def test_an_mpi_for_one_thread_is_refused():
    done = run("mpirun-2", HERE / "funneled.py")
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("refused: MPI was initialized without support for several threads: let mpi4py") == 2


@pytest.mark.alone
@pytest.mark.tier("test")
def test_containers_are_those_of_ddp(tmp_path):
    skip_without("torch")
    done = run("mpirun-2", HERE / "containers.py", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    counts = re.findall(r"(\d+) containers are the same", done.stdout)
    assert len(counts) == 2 and min(map(int, counts)) >= 12

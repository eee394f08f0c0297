"""The kernels for accelerators, in Triton's interpreter: the same bytes as the host's. The checks are in checks_*.py."""

from pathlib import Path

import pytest
from support.launch import INTERPRETER, checks_in, of_jobs, run, skip_without, start_job

skip_without("torch", "triton")
HERE = Path(__file__).parent
PARTS = ("index", "packed", "selection", "sketch", "traffic", "values")
CHECKS = checks_in(*(HERE / f"checks_{part}.py" for part in PARTS))


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, launchers=INTERPRETER)
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)


@pytest.mark.tier("test")
@pytest.mark.alone
@pytest.mark.mpi
@pytest.mark.parametrize(
    "worker, specs",
    [
        ("ddp_worker.py", ["topk:0.02/rice/qsgd:7", "dense/qsgd:4", "adam", "onebit_adam", "powersgd:2", "rows"]),
        ("fsdp_worker.py", ["dense/qsgd:4+residual:bits=8", "topk:0.05/rice/raw+none"]),
    ],
)
def test_a_training_is_the_same_with_kernels(worker, specs):
    done = run("interpreted-torchrun-2", HERE / worker, *specs)
    assert done.returncode == 0, done.stdout[-4000:]
    assert all(f"rank {rank}: {spec} is the same" in done.stdout for rank in range(2) for spec in specs)

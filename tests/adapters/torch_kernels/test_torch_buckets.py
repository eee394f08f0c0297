"""Buckets on an accelerator, in Triton's interpreter: the host's bits, and what crosses. The checks are in checks_*.py."""

from pathlib import Path

import pytest
from support.launch import INTERPRETER, checks_in, of_jobs, skip_without, start_job

skip_without("torch", "triton")
HERE = Path(__file__).parent
CHECKS = checks_in(*(HERE / f"checks_{part}.py" for part in ("bucket", "containers", "lowrank", "rows")))


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "worker.py")


@of_jobs(CHECKS, launchers=INTERPRETER)
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)

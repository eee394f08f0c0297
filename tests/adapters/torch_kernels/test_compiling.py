"""All kernels compile for accelerators that are not here; what their machine code does to registers and to floats."""

from pathlib import Path

import pytest
from support.launch import OWN_PROCESS, checks_in, of_jobs, skip_without, start_job

skip_without("torch", "triton")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    return start_job(request, tmp_path_factory, HERE / "compiling_worker.py")


@of_jobs(checks_in(HERE / "checks_compiling.py"), launchers=OWN_PROCESS)
def test_check(job, name, record_property):
    record_property("seconds", job.seconds[0].get(name, 0.0))
    job.assert_ok(name)

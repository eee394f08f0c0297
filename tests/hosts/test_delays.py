"""A short run of benchmarks/delays.py: ranks that stop at random times stay in step, with every communicator."""

import subprocess
import sys

import pytest
from support.hosts import ENVIRONMENT, ROOT

BENCHMARK = ROOT / "benchmarks" / "delays.py"


@pytest.mark.mpi
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("horovodrun --gloo", marks=pytest.mark.tier("test")),
        pytest.param("mpirun", marks=pytest.mark.tier("all")),
    ],
)
def test_ranks_that_pause_at_random_stay_bit_identical(machine, tmp_path, launcher):
    command = [
        sys.executable,
        BENCHMARK,
        "--steps",
        "100",
        "--launchers",
        launcher,
        "--name",
        "tests",
        "--timeout",
        "1500",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all(" 100 steps in " in line and "bit-identical" in line for line in lines), lines
    assert "It is met." in (tmp_path / "benchmarks.md").read_text()

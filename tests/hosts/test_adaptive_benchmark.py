"""benchmarks/adaptive.py comes to its end, on two hosts, and writes its section. That Kimad sends what there is time for is
checked in virtual time (tests/adapters/horovod_torch/checks_methods.py); how much less it sends here is the benchmark's to tell."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts import ENVIRONMENT, hosts

ROOT = Path(__file__).parents[2]


@pytest.mark.mpi
@pytest.mark.tier("all")
def test_the_adaptive_benchmark_writes_its_section(machine, data, tmp_path):
    pytest.importorskip("matplotlib")
    command = [
        sys.executable,
        ROOT / "benchmarks" / "adaptive.py",
        "--data",
        data,
        "--hosts",
        "2",
        "--rates",
        "100mbit",
        "10mbit",
        "--seconds",
        "5",
        "--time",
        "0.3",
        "--name",
        "tests",
        "--out",
        tmp_path,
        "--raw",
        tmp_path / "raw",
    ]
    try:
        done = subprocess.run(
            command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800
        )
    finally:
        hosts("--name", "tests", "down")
    assert done.returncode == 0, done.stdout[-4000:]
    page = (tmp_path / "benchmarks.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if " of steps on time, " in line]
    cells = {label.strip("| "): others for label, *others in rows}
    assert list(cells) == ["fixed, 5%", "Kimad", "Kimad+"]
    assert all(bytes_of(cell.split(", ")[2]) > 0 for row in cells.values() for cell in row[:2])
    assert (tmp_path / "adaptive.png").stat().st_size > 5000


def bytes_of(text):
    number, unit = text.split()[:2]
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]

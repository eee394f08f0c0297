"""benchmarks/cluster.py from the start to its page, in small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts import ENVIRONMENT, hosts

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cluster.py"

pytestmark = [pytest.mark.mpi, pytest.mark.tier("all")]


def test_the_benchmark_runs_resumes_and_writes_its_section(machine, data, tmp_path):
    command = [
        sys.executable,
        str(BENCHMARK),
        "--data",
        str(data),
        "--raw",
        str(tmp_path / "raw"),
        "--out",
        str(tmp_path),
        "--hosts",
        "2",
        "--models",
        "mlp",
        "--rates",
        "none",
        "--configs",
        "horovod-fp16",
        "sharded",
        "--steps",
        "30",
        "--evaluations",
        "2",
        "--near",
        "1000",
        "--name",
        "tests",
    ]
    try:
        for _ in range(2):
            done = subprocess.run(
                [*command, "--resume"],
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=1800,
            )
            assert done.returncode == 0, done.stdout[-6000:]
    finally:
        hosts("--name", "tests", "down")
    assert done.stdout.count("was measured before") == 3
    page = (tmp_path / "benchmarks.md").read_text()
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in page.splitlines())
        if len(cells) > 9
    }
    assert {"Horovod fp16", "grace_ext, sharded"} <= set(rows)
    assert float(rows["Horovod fp16"][6].rstrip("%")) > 90 and float(rows["grace_ext, sharded"][6].rstrip("%")) > 90
    assert rows["Horovod fp16"][5].endswith(" MB") and rows["grace_ext, sharded"][5].endswith(" kB")
    assert "side by side" in page and os.path.getsize(tmp_path / "cluster.png") > 1000

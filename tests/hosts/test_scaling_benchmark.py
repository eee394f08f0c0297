"""benchmarks/scaling.py comes to its end, on four hosts, and writes its section and its plot."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts import ENVIRONMENT

ROOT = Path(__file__).parents[2]


@pytest.mark.mpi
@pytest.mark.tier("all")
def test_the_scaling_benchmark_writes_its_section(machine, tmp_path):
    pytest.importorskip("matplotlib")
    before, after = "# Benchmarks\n\nBefore.\n", "\nAfter.\n"
    (tmp_path / "benchmarks.md").write_text(f"{before}<!-- scaling:begin -->\nold\n<!-- scaling:end -->{after}")
    options = [
        "--name",
        "tests",
        "--ranks",
        "2",
        "4",
        "--rates",
        "1gbit",
        "--elements",
        "100000",
        "--steps",
        "5",
        "--seconds",
        "0.2",
        "--out",
        str(tmp_path),
        "--logs",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "scaling.py", *options],
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.startswith(before) and page.endswith(after) and "\nold\n" not in page
    # 1,000 of 100,000 elements at 7 bits of value and 8 of position are 2 kB; float16 of all are 200 kB.
    for label, handed in (
        ("Horovod fp16", "200 kB"),
        ("allreduce, fp16", "200 kB"),
        ("sharded", "1.9"),
        ("tree", "1.9"),
        ("DDP fp16", "200 kB"),
        ("allgather over DDP", "1.9"),
    ):
        [row, *_] = (line for line in page.splitlines() if line.startswith(f"| {label} | "))
        assert row.split(" | ")[1].startswith(handed), row
    [row, *_] = (line for line in page.splitlines() if line.startswith("| hierarchical, 2 ranks a host | "))
    assert row.split(" | ")[1] == "" and row.split(" | ")[2].endswith(" B"), row  # each rank a container of its slice
    assert (tmp_path / "scaling.png").stat().st_size > 10_000

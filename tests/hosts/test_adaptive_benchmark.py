"""benchmarks/adaptive.py comes to its end, on two hosts: Kimad sends less where the link gives less."""

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ENVIRONMENT, hosts

ROOT = Path(__file__).parents[2]


@pytest.mark.mpi
def test_kimad_sends_less_where_the_link_gives_less(machine, data, tmp_path):
    pytest.importorskip("matplotlib")
    # The bandwidth is a median of five steps, three of which must have been slow: up to 4 MB at 1.25 MB/s each.
    command = [sys.executable, ROOT / "benchmarks" / "adaptive.py", "--data", data, "--hosts", "2", "--rates", "100mbit",
               "10mbit", "--seconds", "24", "--time", "0.3", "--name", "tests", "--out", tmp_path, "--raw", tmp_path / "raw"]
    try:
        done = subprocess.run(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=900)
    finally:
        hosts("--name", "tests", "down")
    assert done.returncode == 0, done.stdout[-4000:]
    page = (tmp_path / "benchmarks.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if " of steps near, " in line]
    cells = {label.strip("| "): others for label, *others in rows}
    assert list(cells) == ["fixed, 5%", "Kimad", "Kimad+"]
    sent = {label: [bytes_of(cell.split(", ")[2]) for cell in row[:2]] for label, row in cells.items()}
    assert sent["fixed, 5%"][0] == pytest.approx(sent["fixed, 5%"][1], rel=0.2)
    for label in ("Kimad", "Kimad+"):
        assert sent[label][1] < 0.4 * sent[label][0]
    assert (tmp_path / "adaptive.png").stat().st_size > 5000


def bytes_of(text):
    number, unit = text.split()[:2]
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]

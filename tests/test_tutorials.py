"""The tutorials: every program in them runs by the commands in them, and prints what they say."""

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tier("test"), pytest.mark.mpi]

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted(path for path in (ROOT / "docs/tutorials").glob("*.md") if path.stem != "index")
BLOCK = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    ended = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


@pytest.mark.alone
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_its_programs_run(tutorial, tmp_path):
    printed = ""
    commands = 0
    for language, title, text in BLOCK.findall(tutorial.read_text()):
        if title:
            (tmp_path / title).write_text(text)
        elif language == "bash":
            printed = run(text, tmp_path)
            commands += 1
        elif language == "text":
            assert text in printed
    assert commands


def test_training_programs_learn_and_compress(tmp_path):
    """The program for DDP prints a loss that falls and what was sent."""
    blocks = BLOCK.findall((ROOT / "docs/tutorials/pytorch-ddp.md").read_text())
    (tmp_path / "train.py").write_text(next(text for _, title, text in blocks if title == "train.py"))
    printed = run("torchrun --standalone --nproc-per-node 2 train.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 1 < 2 < losses[0]
    assert int(re.search(r"(\d+) times fewer", printed)[1]) > 10

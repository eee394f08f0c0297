"""Elastic Horovod as users start it: workers are stopped and killed, others are added, and removed again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch import OPEN_MPI_FOLDER, environment

HERE = Path(__file__).parent
HANGS = 1800  # seconds after which a job is taken to hang, on however slow a machine

pytestmark = [pytest.mark.mpi, pytest.mark.tier("test")]


def seconds_to_start() -> float:
    """How long a worker takes to import what it needs on this machine, as busy as it is now. Gloo's timeout, after which
    survivors no longer wait for the dead, must be longer than a new worker takes to join them."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import grace_ext.adapters.horovod_torch"], check=True)
    return time.monotonic() - began


def run(command: list[str], folder: Path, *arguments: str) -> tuple[list[dict], str]:
    """What the workers wrote, and the job's output."""
    variables = environment() | {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(60, round(20 * seconds_to_start()))),
        "GRACE_EXT_STOPPED_SECONDS": "5",
        OPEN_MPI_FOLDER: str(folder),
    }
    process = subprocess.Popen(
        [*command, sys.executable, str(HERE / "train.py"), str(folder), *arguments],
        env=variables,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=HANGS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {HANGS} s; its output:\n{output[-8000:]}") from None
    assert process.returncode == 0, output[-8000:]
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))], output


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disturbed")
    # Names that all mean this machine count as several hosts. Horovod uses a host no more on which a worker died.
    (folder / "hosts").write_text("localhost:2\n127.0.0.1:1\n")
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n")
    script.chmod(0o755)
    return run(
        [
            "horovodrun",
            "--gloo",
            "-np",
            "3",
            "--min-np",
            "2",
            "--max-np",
            "4",
            "--network-interfaces",
            "lo",
            "--host-discovery-script",
            str(script),
        ],
        folder,
    )


@pytest.fixture(scope="module")
def undisturbed(disturbed, tmp_path_factory):
    """The same number of steps."""
    return run(
        ["mpirun", "-np", "2", "--oversubscribe"], tmp_path_factory.mktemp("undisturbed"), str(disturbed[0][0]["steps"])
    )


def test_training_goes_on_when_workers_are_stopped_killed_added_and_removed(disturbed):
    results, output = disturbed
    assert len(results) == 2, output[-4000:]
    assert re.search("a signal stopped rank [0-2] ", output), output[-4000:]
    for result in results:
        assert result["visited"] == [3, 2, 4, 4, 2], result
        assert result["identical"] == [True] * 4 * 6, result
    assert [result["checked"] for result in results[1:]] == [results[0]["checked"]]


def test_memories_follow_the_declared_policy(disturbed):
    results, output = disturbed
    for kind, ranks, kept, reset in results[0]["checked"][3:]:
        if kind == "ef21":
            assert kept < 1e-5 * reset, "the aggregate is not the mean of the estimates"
        else:
            right, wrong = (kept, reset) if kind == "redistribute" else (reset, kept)
            assert right < 1e-4 and wrong > 100 * right, (kind, ranks, kept, reset)
    for before, now in ((2, 2), (2, 4)):
        changed = f"there are {now}, of which {before} were there before; memories"
        assert f"{changed} of these {before} were redistributed" in output
        assert f"{changed} start from zero (on_resize='reset')" in output


def test_the_loss_is_that_of_an_undisturbed_run(disturbed, undisturbed):
    for kind, loss in disturbed[0][0]["loss"].items():
        expected = undisturbed[0][0]["loss"][kind]
        assert loss < 1.15 * expected, (kind, loss, expected)

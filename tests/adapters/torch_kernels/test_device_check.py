"""`python -m grace_ext device-check` on a machine without a GPU."""

import json
import subprocess
import sys

import pytest
from support.launch import skip_without

skip_without("torch", "triton")
pytestmark = pytest.mark.tier("test")


def test_without_a_gpu_it_says_so_and_compares_in_the_interpreter(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "grace_ext", "device-check", "-o", str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "There is no GPU here" in done.stdout
    found = json.loads(report.read_text())
    assert found["device"] is None and found["torch"] == torch.__version__ and "seconds" not in found
    assert len(found["bytes"]) == 156 and all(one["equal"] for one in found["bytes"])
    assert f"156 of 156 comparisons are equal; all is in {report}" in done.stdout


@pytest.mark.mpi
def test_two_ranks_train_with_kernels_and_on_the_host(monkeypatch):
    """As with a GPU, in Triton's interpreter."""
    from grace_ext.adapters._torch import device_check, device_training

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(device_training, "SPECS", ("dense/qsgd:4",))
    done = device_check.train("gloo", "cpu")
    assert done["equal"] == {"dense/qsgd:4": True}, done


def test_a_job_that_ends_early_says_why(monkeypatch):
    from grace_ext.adapters._torch import device_check

    done = device_check.train("no such backend", "cpu")
    assert done["equal"] == {} and "no such backend" in done["output"].lower()


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path):
    report = tmp_path / "missing" / "report.json"
    command = [sys.executable, "-m", "grace_ext", "device-check", "-o", str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert f"grace_ext: {report}: No such file or directory" in done.stderr

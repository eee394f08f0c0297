"""The examples of Accelerate, the Trainer, Lightning, Ray Train and JAX, by the commands in them: two processes, made-up images."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import launch
from support.launch import skip_without

skip_without("torch")

pytestmark = [pytest.mark.tier("test"), pytest.mark.mpi, pytest.mark.alone]
ROOT = Path(__file__).parents[1]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data set of 256 images for training and 64 for the test, in which the brightest row tells the class."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for part, count in (("train", 256), ("t10k", 64)):
        labels = rng.integers(0, 10, count, np.uint8)
        images = rng.integers(0, 40, (count, 28, 28), np.uint8)
        images[np.arange(count), 2 * labels + 4] += 200
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">i{array.ndim}i", 0x0800 + array.ndim, *array.shape)
            (folder / f"{part}-{name}-ubyte").write_bytes(header + array.tobytes())
    return folder


def run(*command: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def ratio(printed: str) -> int:
    return int(re.search(r"(\d+) times fewer bytes", printed)[1])


def test_accelerate_learns_and_goes_on(data, tmp_path):
    skip_without("accelerate")
    example = [*TORCHRUN, "examples/accelerate_fashion_mnist.py", "--data", data, "--batch-size", 16]
    printed = run(*example, "--folder", tmp_path, "--epochs", 2)
    assert [epoch for epoch in re.findall(r"epoch (\d): test accuracy", printed)] == ["1", "2"]
    assert ratio(printed) > 10
    printed = run(*example, "--folder", tmp_path, "--epochs", 4)
    accuracies = dict(re.findall(r"epoch (\d): test accuracy ([\d.]+)%", printed))
    assert list(accuracies) == ["3", "4"] and float(accuracies["4"]) > 50, accuracies
    saved = sorted(path.name for path in (tmp_path / "checkpoints" / "checkpoint_3").glob("grace_ext_*"))
    assert saved == ["grace_ext_0_rank0.pt", "grace_ext_0_rank1.pt"]


def test_lightning_learns_and_goes_on(data, tmp_path):
    skip_without("lightning")
    example = [sys.executable, "examples/lightning_fashion_mnist.py", "--data", data, "--batch-size", 16]
    assert ratio(run(*example, "--folder", tmp_path, "--epochs", 1)) > 10
    printed = run(*example, "--epochs", 4, "--resume", tmp_path / "checkpoints" / "epoch=0-step=8.ckpt")
    assert float(re.search(r"test accuracy ([\d.]+)%", printed)[1]) > 50, printed[-300:]


@pytest.mark.tier("all")  # Ray is installed by make test-all only
def test_ray_learns_and_goes_on(data, tmp_path, monkeypatch):
    skip_without("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    example = [sys.executable, "examples/ray_fashion_mnist.py", "--data", data, "--batch-size", 16, "--folder", tmp_path]
    printed = run(*example, "--epochs", 1)
    assert re.findall(r"epoch (\d): test accuracy", printed) == ["1"] and ratio(printed) > 10, printed[-2000:]
    printed = run(*example, "--epochs", 4)
    accuracies = dict(re.findall(r"epoch (\d): test accuracy ([\d.]+)%", printed))
    assert list(accuracies) == ["2", "3", "4"] and float(accuracies["4"]) > 50, accuracies
    saved = {path.name for path in (tmp_path / "fashion-mnist").glob("checkpoint_*/grace_ext_*")}
    assert saved == {"grace_ext_0_rank0.pt", "grace_ext_0_rank1.pt"}


def test_jax_learns_and_goes_on(data, tmp_path):
    skip_without("jax", "optax", "mpi4py")
    example = ROOT / "examples" / "jax_fashion_mnist.py"

    def trained(folder, epochs):
        arguments = ("--data", data, "--batch-size", 16, "--epochs", epochs, "--folder", folder)
        done = launch.run("mpirun-2", example, *map(str, arguments))
        assert done.returncode == 0, done.stdout[-4000:]
        return dict(re.findall(r"epoch (\d+): test accuracy ([\d.]+)%", done.stdout)), ratio(done.stdout)

    accuracies, times = trained(tmp_path / "whole", 8)
    assert len(accuracies) == 8 and float(accuracies["8"]) > 50 and times > 10, (accuracies, times)
    half, _ = trained(tmp_path / "half", 4)
    rest, _ = trained(tmp_path / "half", 8)
    assert half | rest == accuracies and list(rest) == ["5", "6", "7", "8"]  # as if it had not been interrupted


def test_the_trainer_learns_and_goes_on(tmp_path):
    skip_without("transformers")
    example = [*TORCHRUN, "examples/transformers_text.py", "--layers", 1, "--width", 64, "--steps", 40, "--folder", tmp_path]
    printed = run(*example, "--save-steps", 20)
    assert ratio(printed) > 4
    bits = r"40 steps: ([\d.]+) bits a byte"
    assert float(re.search(bits, printed)[1]) < 6, printed[-300:]
    again = run(*example, "--resume", tmp_path / "checkpoint-20")
    assert re.search(bits, again)[1] == re.search(bits, printed)[1]  # as if it had not been interrupted

"""examples/local_steps_fashion_mnist.py under torchrun, on images made here."""

import gzip
import json

import numpy as np
import pytest
from support import launch

launch.skip_without("torch", "tqdm")

pytestmark = [pytest.mark.mpi, pytest.mark.alone, pytest.mark.tier("test")]
EXAMPLE = launch.TESTS.parent / "examples" / "local_steps_fashion_mnist.py"
CLASSES = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a data set of noisy patterns, in the files of Fashion-MNIST."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    patterns = random.integers(0, 200, (CLASSES, 28, 28))
    for part, count in (("train", 1200), ("t10k", 200)):
        labels = random.integers(0, CLASSES, count)
        images = patterns[labels] + random.integers(0, 56, (count, 28, 28))
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes()
            with gzip.open(folder / f"{part}-{name}-ubyte.gz", "wb") as file:
                file.write(head + array.astype(np.uint8).tobytes())
    return folder


@pytest.mark.parametrize(
    "options, least",
    [
        (["--steps", "8"], 300),
        (["--preset", "diloco", "--steps", "6", "--fragments", "2", "--delay", "2", "--compression", "dense/qsgd:4"], 20),
    ],
    ids=["sparseloco", "streaming"],
)
def test_the_example_learns_and_sends_little(data, tmp_path, options, least):
    log = tmp_path / "log.jsonl"
    arguments = ["--data", str(data), "--epochs", "2", "--batch-size", "16", "--log-file", str(log), *options]
    done = launch.run("torchrun-2", EXAMPLE, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    first, second = map(json.loads, log.read_text().splitlines())
    assert (first["epoch"], second["epoch"]) == (1, 2) and second["steps"] == 2 * first["steps"] > 0
    assert second["ratio"] > least and second["accuracy"] > 0.9, second

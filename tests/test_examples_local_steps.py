"""examples/local_steps_fashion_mnist.py under torchrun, on images made here."""

import json

import pytest
from support import launch
from support.made_images import write_patterns

launch.skip_without("torch", "tqdm")

pytestmark = [pytest.mark.mpi, pytest.mark.alone, pytest.mark.tier("test")]
EXAMPLE = launch.TESTS.parent / "examples" / "local_steps_fashion_mnist.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_patterns(tmp_path_factory.mktemp("data"), train=1200)


@pytest.mark.parametrize(
    "options, least",
    [
        (["--steps", "8"], 300),
        (["--steps", "8", "--delay", "5"], 300),
        ("--preset diloco --steps 6 --fragments 2 --delay 2 --keep 0.5 --compression dense/qsgd:4".split(), 20),
    ],
    ids=["sparseloco", "delayed", "streaming"],
)
def test_the_example_learns_and_sends_little(data, tmp_path, options, least):
    log = tmp_path / "log.jsonl"
    arguments = ["--data", str(data), "--epochs", "2", "--batch-size", "16", "--log-file", str(log), *options]
    done = launch.run("torchrun-2", EXAMPLE, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    first, second = map(json.loads, log.read_text().splitlines())
    assert (first["epoch"], second["epoch"]) == (1, 2) and second["steps"] == 2 * first["steps"] > 0
    assert second["ratio"] > least and second["accuracy"] > 0.9, second

"""examples/fedavg_fashion_mnist.py with a server and three clients, on images made here."""

import json

import pytest
from support import launch
from support.made_images import write_patterns

pytestmark = [pytest.mark.mpi, pytest.mark.alone, pytest.mark.tier("test")]
EXAMPLE = launch.TESTS.parent / "examples" / "fedavg_fashion_mnist.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_patterns(tmp_path_factory.mktemp("data"), train=600)


def run(data, out, *options):
    """What the example wrote."""
    done = launch.run("mpirun-4", EXAMPLE, "--data", str(data), "--out", str(out), *options)
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text())


def test_fedavg_learns_and_sends_little(data, tmp_path):
    result = run(data, tmp_path / "out.json", "--rounds", "8", "--compression", "topk:0.1/rice/lloyd:0.05", "--batch", "16")
    assert [number for number, _ in result["accuracy"]] == list(range(1, 9))
    assert result["accuracy"][-1][1] > 0.9, result["accuracy"]
    assert result["messages_sent"] == result["messages_received"] == [3] * 8 and not any(result["rejected"])
    assert all(0.01 < volume < 0.035 for volume in result["volume"].values()), result["volume"]
    assert all(seconds > 0 for seconds in result["cpu_seconds"].values())


@pytest.mark.tier("all")
def test_float32_is_what_volumes_are_relative_to(data, tmp_path):
    result = run(data, tmp_path / "out.json", "--rounds", "2", "--compression", "dense/raw", "--sampled", "2")
    assert result["messages_sent"] == [2, 2]
    assert all(1 < volume < 1.001 for volume in result["volume"].values()), result["volume"]
    assert result["options"]["beta1"] == 0.9


@pytest.mark.parametrize(
    "method, options",
    [
        ("fedavg", ["--memory", "ef21", "--sampled", "2"]),
        pytest.param("panthalia", ["--evaluate-every", "2", "--batch", "32"], marks=pytest.mark.tier("all")),
    ],
)
def test_a_job_goes_on_from_its_state_as_if_nothing_had_happened(data, tmp_path, method, options):
    options = ["--method", method, *options, "--train-samples", "300"]
    whole = run(data, tmp_path / "whole.json", *options, "--rounds", "4")
    kept = ["--state", str(tmp_path / "state")]
    run(data, tmp_path / "first.json", *options, *kept, "--rounds", "2")
    result = run(data, tmp_path / "rest.json", *options, *kept, "--rounds", "4")
    for key in ("accuracy", "sent", "received", "volume"):
        assert result[key] == whole[key], key
    other = launch.run("mpirun-4", EXAMPLE, "--data", str(data), *options, *kept, "--seed", "1")
    assert other.returncode != 0 and "is the state of a job with other options" in other.stdout


@pytest.mark.tier("all")
def test_panthalia_learns_and_sends_a_hundredth(data, tmp_path):
    options = ["--method", "panthalia", "--rounds", "60", "--evaluate-every", "20", "--batch", "32"]
    result = run(data, tmp_path / "out.json", *options)
    assert result["accuracy"][-1][1] > 0.9, result["accuracy"]
    assert max(result["volume"].values()) < 0.01, result["volume"]
    assert result["options"]["beta1"] == 0  # no momentum where gradients are sparse

"""examples/flower_fashion_mnist.py with a superlink and two supernodes, on images made here."""

import json

import pytest
from support import launch
from support.made_images import write_patterns

launch.skip_without("flwr", "torch")

pytestmark = [pytest.mark.mpi, pytest.mark.alone, pytest.mark.tier("all")]
EXAMPLE = launch.TESTS.parent / "examples" / "flower_fashion_mnist.py"


def run(data, out, *options):
    """What the example wrote."""
    limit = ("--limit", str(launch.HANGS - 200), "--timeout", "600")
    given = ("--data", str(data), "--out", str(out), "--clients", "2", "--rounds", "3", "--batch", "16", *limit, *options)
    done = launch.run("process-1", EXAMPLE, *given)
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_patterns(tmp_path_factory.mktemp("data"), train=600)


def test_it_learns_as_flower_does_and_sends_little(data, tmp_path):
    plain = run(data, tmp_path / "plain.json", "--compression", "flower")
    ours = run(data, tmp_path / "ours.json", "--compression", "topk:0.05/rice/lloyd:0.05")
    for result in (plain, ours):
        assert [number for number, _ in result["accuracy"]] == [1, 2, 3] and result["accuracy"][-1][1] > 0.9
    assert all(report["taken"] == [0, 1] for report in ours["reports"])
    whole = 4 * 535818
    assert all(plain["socket_bytes"][way] > 2 * 3 * whole for way in ("down", "up"))
    # Beside the containers there are Flower's own questions, which are the more the slower the machine is.
    assert all(report["sent"] < 0.1 * whole and report["received"] < 0.1 * whole for report in ours["reports"])
    assert ours["socket_bytes"]["down"] < 0.5 * plain["socket_bytes"]["down"]


def test_options_that_make_no_sense(data, tmp_path):
    done = launch.run("process-1", EXAMPLE, "--data", str(data), "--compression", "no/such")
    assert done.returncode == 2 and "no" in done.stdout

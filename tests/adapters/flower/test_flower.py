"""Under Flower's own superlink and supernodes, as processes on loopback with TLS: nodes that are killed, come and lie.

What needs no processes is in tests/adapters/_flower.
"""

import json
import sys
import time
from pathlib import Path

import pytest
from support import launch

launch.skip_without("flwr")

HERE = Path(__file__).parent
# Flower gives a process 30 s to begin, which one core with other tests beside it does not keep for sure.
pytestmark = [pytest.mark.mpi, pytest.mark.tier("all")]
HONEST, HOSTILE, KILLED, NEW = (0, 1), 2, 3, 4


@pytest.fixture(scope="module")
def flower():
    """The module of the examples that starts Flower's processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(launch.TESTS.parent / "examples"))
        import _flower

        yield _flower
        sys.modules.pop("_flower", None)


@pytest.fixture(scope="module")
def rounds(flower, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower")
    roles = {**dict.fromkeys(HONEST, "honest"), HOSTILE: "hostile", KILLED: "killed"}
    with flower.Federation(folder) as federation:
        for name, role in roles.items():
            federation.add(f"node{name}", name=name, role=role)
        federation.start(HERE / "app", {"folder": str(folder)})
        deadline = time.monotonic() + launch.HANGS
        while not (folder / "training").exists():
            assert federation.poll("run") is None and time.monotonic() < deadline, federation.output("run")[-8000:]
            time.sleep(0.2)
        federation.kill(f"node{KILLED}")
        federation.add(f"node{NEW}", name=NEW, role="honest")
        federation.finish(launch.HANGS)
        assert (folder / "rounds.json").exists(), federation.output("run")[-8000:]
        sockets = {"sockets": [federation.relay.down, federation.relay.up]}
    return [*json.loads((folder / "rounds.json").read_text()), sockets]


def test_rounds_go_on_without_a_node_that_is_killed_and_with_one_that_comes(rounds):
    nodes = [set(one["nodes"]) for one in rounds[1:-1]]
    assert nodes == [
        {*HONEST, HOSTILE, KILLED},
        {*HONEST, KILLED},
        {*HONEST, HOSTILE},
        {*HONEST, NEW},
        {*HONEST, HOSTILE, NEW},
    ]
    assert [len(one["missing"]) for one in rounds[1:-1]] == [0, 0, 1, 0, 0]


def test_who_is_hostile_is_not_believed(rounds):
    reasons = [sorted(one["rejected"].values()) for one in rounds[1:-1]]
    assert [len(one) for one in reasons] == [0, 1, 0, 1, 0]
    assert reasons[1][0].startswith("malformed") and reasons[3][0].startswith("late: an update of round 1")


def test_all_nodes_have_the_same_model_in_each_round(rounds):
    assert all(len(set(one["models"])) == 1 for one in rounds[1:-1])
    assert len({one["models"][0] for one in rounds[1:-1]}) == 5


def test_it_learns_and_sends_little(rounds):
    distances = [one["distance"] for one in rounds[:-1]]
    assert all(after < before for before, after in zip(distances, distances[1:], strict=False)), distances
    whole = 4 * 20000
    # The whole model to each node in the first round, and to the new one in the fourth.
    assert all(whole < one["sent"] / nodes < 1.1 * whole for one, nodes in ((rounds[1], 4), (rounds[4], 1.1)))
    assert all(one["sent"] < 0.2 * whole for one in (rounds[2], rounds[3], rounds[5]))
    assert all(one["received"] < 0.3 * whole for one in rounds[1:-1])
    down, up = rounds[-1]["sockets"]
    assert down > sum(one["sent"] for one in rounds[1:-1]) and up > sum(one["received"] for one in rounds[1:-1])

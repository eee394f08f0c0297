"""Federated training over MPI: a server and four clients, one late, one that leaves, one hostile; and ranks that fail."""

import json
import re
from pathlib import Path

import pytest
from support import launch
from support.federated_rounds import HOSTILE, LATE, LATE_IN, LEAVING, ROUNDS

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federated")
    launch.LAUNCHERS.setdefault("mpirun-5", ["mpirun", "-np", "5", "--oversubscribe"])
    done = launch.run("mpirun-5", HERE / "worker.py", str(folder))
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((folder / "server.json").read_text())


def test_rounds_go_on_with_those_who_answer(server):
    assert len(server["taken"]) == ROUNDS
    others = [client for client in range(4) if client not in (LATE, LEAVING, HOSTILE)]
    assert all(set(others) <= set(taken) for taken in server["taken"])
    assert server["silent"] == []


def test_who_is_late_is_left_out_of_the_round_and_asked_again(server):
    assert [number for number, missing in enumerate(server["missing"], 1) if LATE in missing] == [LATE_IN]
    assert all((LATE in taken) == (number != LATE_IN) for number, taken in enumerate(server["taken"], 1))
    assert [number for number, stale in enumerate(server["stale"], 1) if stale] == [LATE_IN + 1]
    assert server["stale"][LATE_IN] == {str(LATE): 1}


def test_who_leaves_is_not_asked_any_more(server):
    assert all(LEAVING in taken for taken in server["taken"][:7])
    assert all(
        LEAVING not in taken and LEAVING not in missing
        for taken, missing in zip(server["taken"][12:], server["missing"][12:], strict=True)
    )


def test_who_is_hostile_is_not_believed(server):
    reasons = {number: server["rejected"][number - 1][str(HOSTILE)].split(":")[0] for number in range(3, 7)}
    assert reasons == {3: "oversized", 4: "malformed", 5: "not finite", 6: "norm"}
    assert all(HOSTILE in taken for number, taken in enumerate(server["taken"], 1) if not 3 <= number <= 6)
    assert "late" not in server["rejections"]


def test_the_model_goes_where_the_weighted_mean_is(server):
    assert server["distance"] < 5  # it begins at more than 50
    whole = 4 * 2000 * 4
    assert max(server["sent"][1:7]) < 0.2 * whole and max(server["received"][10:]) < 0.2 * whole


@pytest.mark.alone
@pytest.mark.tier("test")
@pytest.mark.parametrize("staleness", [10, 0])
def test_a_client_slower_than_a_round_gets_the_newest_model_only(tmp_path, staleness):
    """One at a time. Its late updates count, and it begins again after it has lost its state; or they are rejected."""
    launch.LAUNCHERS.setdefault("mpirun-3", ["mpirun", "-np", "3", "--oversubscribe"])
    done = launch.run("mpirun-3", HERE / "slow.py", str(tmp_path), str(staleness))
    assert done.returncode == 0, done.stdout[-4000:]
    server, client = (json.loads((tmp_path / name).read_text()) for name in ("server.json", "slow.json"))
    rounds, slow, d = 16, 1, 300_000
    assert all(0 in taken for taken in server["taken"]) and server["silent"] == []
    assert client["asked"] == ([1, 5, 9, 13] if staleness else [1, 4, 8, 12, 16])
    models = sum(server["sent"]) / (4 * d)
    assert models == pytest.approx(rounds + len(client["asked"]), abs=0.1)
    late = {number: one[str(slow)] for number, one in enumerate(server["stale"], 1) if one}
    assert late == ({4: 3, 8: 3, 12: 3, 16: 3} if staleness else {})
    assert [number for number, taken in enumerate(server["taken"], 1) if slow in taken] == list(late)
    assert server["rejections"] == ({} if staleness else {"late": 5})  # the last one came during stop()
    assert not staleness or client["estimate"] == server["estimate"]


@pytest.mark.alone
@pytest.mark.tier("test")
def test_a_message_that_stops_in_the_middle_keeps_only_its_client_from_being_heard(tmp_path):
    # Through sockets, where nothing arrives unless the sender calls MPI.
    launch.LAUNCHERS.setdefault("mpirun-3-tcp", ["mpirun", "-np", "3", "--oversubscribe", "--mca", "btl", "tcp,self"])
    done = launch.run("mpirun-3-tcp", HERE / "stuck.py", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    server = json.loads((tmp_path / "server.json").read_text())
    assert server["taken"] == [[0], [0, 1], [0, 1]] and server["missing"] == [[1], [], []]
    assert server["stale"] == [{}, {"1": 1}, {}] and server["silent"] == []


@pytest.mark.alone
@pytest.mark.tier("test")
def test_a_client_that_never_stops_to_send_keeps_nobody_from_being_heard():
    launch.LAUNCHERS.setdefault("mpirun-1", ["mpirun", "-np", "1"])
    done = launch.run("mpirun-1", HERE / "endless.py")
    assert done.returncode == 0 and "all rounds have ended" in done.stdout, done.stdout[-4000:]


@pytest.mark.alone
@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "where, says",
    [
        ("server", "RuntimeError: rank 0 gives up"),
        ("train", "RuntimeError: rank 1 gives up"),
        ("stopped server", "the server, rank 0, has said nothing for 2 s to rank "),
        ("stop", "rank 0 ends before FederatedServer.stop()"),
        ("exit", "rank 1 ends within FederatedClient.run()"),
    ],
)
def test_no_rank_is_left_hanging_when_one_fails(where, says):
    done = launch.run("mpirun-4", HERE / "failing.py", where)
    assert done.returncode != 0 and says in done.stdout and "all rounds were played" not in done.stdout


@pytest.mark.alone
@pytest.mark.tier("test")
@pytest.mark.parametrize("where", ["model", "update"])
def test_a_server_that_is_stopped_amid_a_message_leaves_no_client_hanging(where, tmp_path):
    launch.LAUNCHERS.setdefault("mpirun-2-tcp", ["mpirun", "-np", "2", "--oversubscribe", "--mca", "btl", "tcp,self"])
    done = launch.run("mpirun-2-tcp", HERE / "stopped_server.py", str(tmp_path), where)
    assert done.returncode != 0
    assert "the server, rank 0, has said nothing for 2 s to rank 1" in done.stdout, done.stdout[-4000:]


@pytest.mark.alone
@pytest.mark.tier("test")
def test_a_client_that_is_stopped_keeps_nobody_from_ending():
    done = launch.run("mpirun-4", HERE / "failing.py", "stopped")
    assert "all rounds were played" in done.stdout, done.stdout[-4000:]
    assert re.search(r"ranks \[[^]]*\b1\b[^]]*\] did not answer", done.stdout), done.stdout[-4000:]


@pytest.mark.alone
@pytest.mark.tier("test")
def test_a_job_without_a_failure_ends_in_order():
    done = launch.run("mpirun-4", HERE / "failing.py", "nowhere")
    assert done.returncode == 0 and "all rounds were played" in done.stdout, done.stdout[-4000:]


@pytest.mark.alone
@pytest.mark.tier("test")
def test_with_a_pace_messages_are_as_long_as_there_is_time_for(tmp_path):
    """Densities as they are without a pace; next to nothing if the time is over before it begins; all if it is long."""
    done = launch.run("mpirun-4", HERE / "paced.py", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads((tmp_path / "paced.json").read_text())
    d, clients, density = 20_000, 3, 0.05
    assert all(one["taken"] == clients and one["silent"] == [] for one in found.values())
    assert found["None"]["bandwidths"] == [] and all(rate > 0 for rate in found["3600.0"]["bandwidths"])
    for way in ("sent", "received"):
        elements = {pace: one[way] / clients / 4 for pace, one in found.items()}  # at least, for positions take bytes, too
        assert density * d < elements["None"] < 2 * density * d
        assert elements["1e-06"] < 0.01 * d and elements["3600.0"] > d


def test_a_job_starts_where_a_killed_one_of_the_same_number_left_its_files(tmp_path):
    """They are in the folder for temporary files, under the number of mpirun's process."""
    left = "mkdir ompi.$$ && for name in $HOSTNAME ${HOSTNAME%%.*}; do touch ompi.$$/pmix.$name.tool; done"
    launch.LAUNCHERS.setdefault("mpirun-after", ["bash", "-c", f'cd "$TMPDIR" && {left} && exec mpirun -np 1 "$@"', "bash"])
    script = tmp_path / "rank.py"
    script.write_text("from mpi4py import MPI\nprint(MPI.COMM_WORLD.size, 'rank')\n")
    done = launch.run("mpirun-after", script, variables={"TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stdout.strip()) == (0, "1 rank")

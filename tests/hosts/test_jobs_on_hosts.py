"""Jobs across hosts, started as on a cluster (docs/cluster.md): they train, and they end when a host crashes."""

import pytest
from support.host_jobs import JOB, LAUNCHERS
from support.hosts import wait_until

FOREVER = 10**9  # steps

pytestmark = [pytest.mark.mpi, pytest.mark.tier("test")]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_trains_across_hosts(three, start, launcher):
    before = three.bytes()
    job = start(launcher, ranks=2, steps=50)
    output = job.end(900)
    assert job.process.returncode == 0, output[-4000:]
    first, second = job.results()
    assert (first["host"], second["host"]) == ("host1", "host2")
    for result in (first, second):
        assert result["hosts"] == ["host1", "host2"]
        assert result["identical"] and result["ratio"] > 100, result
    # The containers went by the link.
    assert three.bytes()["host2"]["tx"] - before["host2"]["tx"] > 50 * 400


@pytest.mark.parametrize("launcher", ["horovodrun-gloo", "mpirun"])
def test_between_hosts_with_latency_containers_go_by_gloo_beside_horovod(three, start, launcher):
    """Nobody says which of a host's addresses the others reach; two ranks are on host1."""
    three("delay", 20)
    try:
        job = start(launcher, ranks=4, steps=10, a_host=2)
        output = job.end(900)
    finally:
        three("delay", 0)
    assert job.process.returncode == 0, output[-4000:]
    results = job.results()
    assert [result["host"] for result in results] == ["host1", "host1", "host2", "host2"]
    assert all(result["identical"] and result["transport"] == "GlooTransport" for result in results), results


@pytest.mark.parametrize(
    "launcher, backend",
    [*((launcher, "horovod") for launcher in LAUNCHERS), ("horovodrun-gloo", "gloo"), ("horovodrun-mpi", "gloo")],
)
def test_all_other_ranks_end_when_a_host_crashes(three, start, launcher, backend):
    job = start(launcher, ranks=3, steps=FOREVER, options=("topk:0.01/rice/qsgd:7", "allgather", 400, backend))
    three("crash", 3)
    output = job.end(900)
    three("boot", 3)
    # mpirun of Open MPI 5.0 tells what happened and ends all ranks, but its status may be 0 nevertheless.
    assert "lost communication with a remote daemon" in output or job.process.returncode != 0, output[-4000:]
    for result in job.results():
        assert "HorovodInternalError" in result["error"], result
    for host in (1, 2):
        assert wait_until(lambda host=host: JOB.name not in three("exec", host, "ps", "-A", "-o", "args="))

"""The communicator `hierarchical` where it is at home: on hosts with several ranks. By the bytes on the links."""

import pytest

WIDTH = 20_000  # of the network: containers are large against what Horovod says while it waits

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    "launcher",
    [pytest.param("horovodrun-gloo", marks=pytest.mark.tier("test")), pytest.param("mpirun", marks=pytest.mark.tier("all"))],
)
def test_hosts_send_a_container_each_and_not_their_ranks(three, start, launcher):
    """Of two hosts with two ranks each; dense values stay inside. What the jobs do besides is the same for both."""
    sent = {}
    for communicator in ("allgather", "hierarchical"):
        before = three.bytes()
        job = start(launcher, ranks=4, steps=10, a_host=2, options=["dense/fp16", communicator, WIDTH])
        output = job.end(900)
        assert job.process.returncode == 0, output[-4000:]
        after = three.bytes()
        sent[communicator] = [after[host]["tx"] - before[host]["tx"] for host in ("host1", "host2")]
        for result in job.results():
            assert result["identical"] and result["hosts"] == ["host1", "host1", "host2", "host2"], result
    container = 2 * 110 * WIDTH  # bytes
    assert min(sent["allgather"]) > 10 * 2 * container
    assert 10 * container < max(sent["hierarchical"]) < 0.75 * min(sent["allgather"]), sent

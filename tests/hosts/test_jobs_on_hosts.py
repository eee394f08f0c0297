"""Jobs across hosts, started as on a cluster (docs/cluster.md): they train, and they end when a host crashes."""

import json
import sys
from pathlib import Path

import pytest
from cluster import ENVIRONMENT, wait_until

JOB = Path(__file__).parent / "job.py"
FOREVER = 10**9  # steps
PASSED_ON = [name for name in ("PATH", "PYTHONPATH", "GRACE_EXT_CACHE", "OMP_NUM_THREADS") if name in ENVIRONMENT]

LAUNCHERS = {
    "horovodrun-gloo": ["horovodrun", "--gloo", "--network-interfaces", "eth0"],
    "horovodrun-mpi": ["horovodrun", "--mpi", "--network-interfaces", "eth0"],
    "mpirun": ["mpirun", "--map-by", "slot", "--bind-to", "none", "--mca", "btl_tcp_if_include", "eth0",
               *(word for name in PASSED_ON for word in ("-x", name))],
}

pytestmark = [pytest.mark.mpi, pytest.mark.parametrize("launcher", LAUNCHERS)]


class Job:
    """A job of one rank on each of the first hosts."""

    def __init__(self, three, launcher: str, ranks: int, steps: int, folder: Path):
        self.folder, self.ranks = folder, ranks
        names = ",".join(f"host{host}:1" for host in range(1, ranks + 1))
        environment = {**ENVIRONMENT, "OMPI_MCA_mpi_yield_when_idle": "1"}  # there are more ranks than processors
        self.process = three.start("exec", 1, *LAUNCHERS[launcher], "-np", ranks, "-H", names, sys.executable, JOB, folder,
                                   steps, env=environment)

    def end(self, timeout: float) -> str:
        """Its output."""
        output, _ = self.process.communicate(timeout=timeout)
        return output

    def results(self) -> list[dict]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("rank*.json"))]

    def has_started(self) -> bool:
        """All ranks have done some steps. If not, the job has been ended."""
        def started():
            return len(list(self.folder.glob("progress*"))) == self.ranks

        if wait_until(lambda: started() or self.process.poll() is not None, 300) and started():
            return True
        self.process.terminate()
        self.output = self.end(30)
        return False


@pytest.fixture
def start(three, tmp_path):
    """Start a job and wait until it trains."""
    jobs = []

    def start(launcher, ranks, steps):
        # A second time, because the prterun of Open MPI 5.0 stands still once in a while when it starts or ends programs on
        # several hosts, whatever they are (github.com/open-mpi/ompi/issues/12939).
        for attempt in ("first", "second"):
            folder = tmp_path / attempt
            folder.mkdir()
            jobs.append(Job(three, launcher, ranks, steps, folder))
            if jobs[-1].has_started():
                return jobs[-1]
        raise AssertionError(jobs[-1].output[-8000:])

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
            job.end(30)


def test_a_job_trains_across_hosts(three, start, launcher):
    before = three.bytes()
    job = start(launcher, ranks=2, steps=50)
    output = job.end(300)
    assert job.process.returncode == 0, output[-4000:]
    first, second = job.results()
    assert (first["host"], second["host"]) == ("host1", "host2")
    for result in (first, second):
        assert result["hosts"] == ["host1", "host2"]
        assert result["identical"] and result["ratio"] > 100, result
    # The containers went by the link.
    assert three.bytes()["host2"]["tx"] - before["host2"]["tx"] > 50 * 400


def test_all_other_ranks_end_when_a_host_crashes(three, start, launcher):
    job = start(launcher, ranks=3, steps=FOREVER)
    three("crash", 3)
    output = job.end(180)
    three("boot", 3)
    # mpirun of Open MPI 5.0 tells what happened and ends all ranks, but its status may be 0 nevertheless.
    assert "lost communication with a remote daemon" in output or job.process.returncode != 0, output[-4000:]
    for result in job.results():
        assert "HorovodInternalError" in result["error"], result
    for host in (1, 2):
        assert wait_until(lambda host=host: JOB.name not in three("exec", host, "ps", "-A", "-o", "args="))

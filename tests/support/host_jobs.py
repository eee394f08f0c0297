"""Jobs across hosts, started as on a cluster (docs/cluster.md)."""

import json
import sys
from pathlib import Path

from support.hosts import ENVIRONMENT, wait_until

JOB = Path(__file__).parents[1] / "hosts" / "job.py"
PASSED_ON = [name for name in ("PATH", "PYTHONPATH", "GRACE_EXT_CACHE", "OMP_NUM_THREADS") if name in ENVIRONMENT]

LAUNCHERS = {
    "horovodrun-gloo": ["horovodrun", "--gloo", "--network-interfaces", "eth0"],
    "horovodrun-mpi": ["horovodrun", "--mpi", "--network-interfaces", "eth0"],
    "mpirun": [
        "mpirun",
        "--map-by",
        "slot",
        "--bind-to",
        "none",
        "--mca",
        "btl_tcp_if_include",
        "eth0",
        *(word for name in PASSED_ON for word in ("-x", name)),
    ],
}


class Job:
    """A job of as many ranks on each of the first hosts. options: of job.py."""

    def __init__(self, up, launcher: str, ranks: int, steps: int, folder: Path, a_host: int = 1, options=()):
        self.folder, self.ranks = folder, ranks
        names = ",".join(f"host{host}:{a_host}" for host in range(1, ranks // a_host + 1))
        environment = {**ENVIRONMENT, "OMPI_MCA_mpi_yield_when_idle": "1"}  # there are more ranks than processors
        self.process = up.start(
            "exec",
            1,
            *LAUNCHERS[launcher],
            "-np",
            ranks,
            "-H",
            names,
            sys.executable,
            JOB,
            folder,
            steps,
            *options,
            env=environment,
        )

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
        self.output = self.end(300)
        return False

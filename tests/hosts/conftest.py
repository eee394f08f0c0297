import fcntl
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from support.host_jobs import Job
from support.hosts import CANNOT, Hosts, hosts

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def machine():
    """A machine that can make hosts, for this run of pytest alone: another in this checkout waits."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    folder = os.open(HERE, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    hosts("--name", "tests", "down", check=True)  # of a run that was killed
    done = hosts("--name", "tests", "up", "1", "none")
    if done.returncode == CANNOT:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
    hosts("--name", "tests", "down", check=True)
    yield
    os.close(folder)


@pytest.fixture(scope="module")
def three(machine):
    """host1 to host3, without a limit."""
    with Hosts("tests", 3, "none") as up:
        yield up


@pytest.fixture
def start(three, tmp_path):
    """Start a job and wait until it trains."""
    jobs = []

    def start(launcher, ranks, steps, **options):
        # A second time, because the prterun of Open MPI 5.0 stands still once in a while when it starts or ends programs on
        # several hosts, whatever they are (github.com/open-mpi/ompi/issues/12939).
        for attempt in ("first", "second"):
            folder = tmp_path / f"{len(jobs)}.{attempt}"
            folder.mkdir()
            jobs.append(Job(three, launcher, ranks, steps, folder, **options))
            if jobs[-1].has_started():
                return jobs[-1]
        raise AssertionError(jobs[-1].output[-8000:])

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
            job.end(300)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Images of two kinds, bright and dark, in the files of Fashion-MNIST."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for part, count in (("train", 400), ("t10k", 100)):
        labels = random.integers(0, 2, count).astype(np.uint8)
        images = random.integers(0, 128, (count, 28, 28)).astype(np.uint8) + 127 * labels[:, None, None]
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), 1))
    return folder

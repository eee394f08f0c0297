import fcntl
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cluster import CANNOT, Hosts, hosts  # noqa: E402


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

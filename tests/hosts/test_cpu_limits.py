"""Control groups that limit processor time: mpirun/cpu_limits.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "mpirun"))
import cpu_limits
from machine import Failure

pytestmark = pytest.mark.tier("test")


def test_a_group_is_removed_when_its_processes_have_ended():
    group = cpu_limits.Group(f"grace_ext.test.{os.getpid()}")
    try:
        group.limit(0.5)
    except Failure as failure:
        pytest.skip(str(failure))
    process = subprocess.Popen(
        [sys.executable, "-c", "print('started', flush=True); import time; time.sleep(0.5)"], stdout=-1
    )
    try:
        process.stdout.readline()
        group.add([process.pid])
        group.remove()
        assert process.wait(60) == 0
        group.remove()  # of one that is not there
    finally:
        process.communicate()

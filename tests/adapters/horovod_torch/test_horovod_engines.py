"""The optimizer, unchanged, in ranks that horovod.spark and horovod.ray start. `make test-all` installs Ray, and PySpark, which
needs Java."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from support.launch import run, skip_without

pytestmark = [pytest.mark.mpi, pytest.mark.tier("all")]
skip_without("torch", "horovod", "pyspark", "ray")


@pytest.mark.parametrize("engine", ["spark", "ray"])
def test_its_ranks_train_alike(engine):
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("there is no Java")
    done = run("process-1", Path(__file__).parent / "in_engine.py", engine, variables={"PYSPARK_PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads(re.search(r"found (\[.*\])", done.stdout)[1])
    assert [one["rank"] for one in found] == [0, 1]
    assert found[0]["weights"] == found[1]["weights"]
    assert [one["stats"] for one in found] == [5, 5]

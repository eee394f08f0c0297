"""The optimizer, unchanged, in ranks that horovod.spark starts. PySpark is installed by `make test-all` only, and needs Java."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from support.launch import run, skip_without

pytestmark = [pytest.mark.mpi, pytest.mark.tier("all")]
skip_without("torch", "horovod", "pyspark")


def test_spark_starts_ranks_that_train_alike():
    if shutil.which("java") is None:
        pytest.skip("there is no Java")
    done = run("process-1", Path(__file__).parent / "in_spark.py", variables={"PYSPARK_PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads(re.search(r"found (\[.*\])", done.stdout)[1])
    assert [one["rank"] for one in found] == [0, 1]
    assert found[0]["weights"] == found[1]["weights"]
    assert [one["stats"] for one in found] == [5, 5]

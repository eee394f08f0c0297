"""What is checked inside the ranks of one job: observers of the TensorFlow adapter."""

import json
import shutil
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from checking import check
from harness_tensorflow import compressed, same_on_all_ranks, train

from grace_ext.adapters.horovod_tensorflow import compression_stats
from grace_ext.observe import Timeline


@check
def observers_of_tapes_write_and_change_nothing():
    folder = Path(tempfile.mkdtemp(prefix="grace_ext"))  # of this rank
    for in_graph in (True, False):
        plainly, _ = train(compressed(), 12, in_graph)
        name = "graph" if in_graph else "eager"
        timeline = Timeline(folder / f"{name}.{{rank}}.json", steps=[11])
        # Eagerly every step makes a tape: a path must not start another exchange.
        observe = [str(folder / f"{name}.{{rank}}.jsonl"), folder / f"{name}.csv", timeline]
        weights, sources = train(compressed(observe=observe), 12, in_graph)
        same_on_all_ranks(weights)
        assert np.array_equal(weights, plainly)
        records = [json.loads(line) for line in open(folder / f"{name}.{hvd.rank()}.jsonl")]
        assert [record["step"] for record in records] == [0, 10], records
        assert (folder / f"{name}.csv").exists() == (hvd.rank() == 0)
        stats = compression_stats(sources)
        assert stats["steps"] == 12
        assert stats["residual_norm_ratio"] == records[1]["residual_norm_ratio"]
        assert 0 < stats["residual_norm_ratio"]["variable0"] < 20, stats
        events = json.loads((folder / f"{name}.{hvd.rank()}.json").read_text())
        phases = {event["name"]: event for event in events if event["ph"] == "X"}
        assert {"encode", "select", "index", "value", "exchange", "decode"} <= phases.keys(), events
        assert phases["encode"]["ts"] + phases["encode"]["dur"] <= phases["exchange"]["ts"] + 1, phases
    hvd.allreduce(tf.zeros(1), name="observed")
    shutil.rmtree(folder)

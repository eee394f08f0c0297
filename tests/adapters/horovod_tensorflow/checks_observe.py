"""What is checked inside the ranks of one job: observers of the TensorFlow adapter."""

import json
import shutil
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import compressed, same_on_all_ranks, train
from support.checking import check, raises

from grace_ext import ConfigError
from grace_ext.adapters.horovod_tensorflow import DistributedGradientTape, compression_stats
from grace_ext.observe import JsonlWriter, Timeline
from grace_ext.observe.capture import Capture


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


@check
def an_observer_made_anew_at_each_step_is_told():
    """Each would have an exchange of its own, without what the one before had not sent yet."""
    with tempfile.TemporaryDirectory() as folder:
        sources = [tf.Variable(tf.ones((40, 50)), name="table")]
        for what, make in (("observe", lambda: JsonlWriter(f"{folder}/a.jsonl")), ("capture", lambda: Capture(folder, [3]))):

            def step(**options):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(sources[0] ** 2)
                tape = DistributedGradientTape(tape, compression="topk:0.01/rice/raw", **options)
                tape.gradient(loss, sources)
                return tape.compression_stats()["steps"]

            one = make()
            assert [step(**{what: one}) for _ in range(2)] == [1, 2]
            with raises(ConfigError, f"{what}: this tape has another object"):
                step(**{what: make()})

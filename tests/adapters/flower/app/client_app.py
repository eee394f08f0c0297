"""The clients of test_flower.py: nodes that train towards ones, one that is killed at it, and one that is hostile."""

import time
import zlib
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from grace_ext.adapters.flower import CompressionMod

GARBAGE_IN, REPLAYS_IN, KILLED_IN = 2, 4, 3  # rounds


def tamper(message, context, call_next):
    """What the hostile node sends instead of its update."""
    round_ = message.content["config"]["server-round"]
    reply = call_next(message, context)
    if context.node_config["role"] == "hostile":
        update = reply.content["grace_ext"]["message"]
        kept = context.state.setdefault("kept", ConfigRecord({"update": update}))
        sent = {GARBAGE_IN: b"garbage" * 1000, REPLAYS_IN: kept["update"]}.get(round_, update)
        reply.content["grace_ext"] = ConfigRecord({"message": sent})
    return reply


app = ClientApp(mods=[tamper, CompressionMod()])


@app.train()
def train(message, context):
    config, round_ = context.node_config, message.content["config"]["server-round"]
    model = message.content["arrays"]["0"].numpy()
    if config["role"] == "killed" and round_ == KILLED_IN:
        Path(context.run_config["folder"], "training").touch()
        while True:
            time.sleep(1)
    random = np.random.default_rng((config["name"], round_))
    trained = model + (1 - model) * random.uniform(0.05, 0.15, model.size).astype(np.float32)
    metrics = MetricRecord({"num-examples": 1, "name": config["name"], "model": zlib.crc32(model.tobytes())})
    return Message(RecordDict({"arrays": ArrayRecord([trained]), "metrics": metrics}), reply_to=message)

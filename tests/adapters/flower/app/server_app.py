"""The server of test_flower.py: it writes what became of each round into its folder."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp

from grace_ext.adapters.flower import CompressedFedAvg

app = ServerApp()
SIZE = 20000


def named(contents, key):
    """Metrics of a round: which nodes' updates were accepted, and the models that they had."""
    metrics = [content["metrics"] for content in contents]
    return MetricRecord({"nodes": [one["name"] for one in metrics], "models": [one["model"] for one in metrics]})


@app.main()
def main(grid, context):
    config, rounds = context.run_config, []
    strategy = CompressedFedAvg(
        config["compression"],
        memory=config["memory"],
        fraction_evaluate=0.0,
        min_train_nodes=config["nodes"],
        min_available_nodes=config["nodes"],
        train_metrics_aggr_fn=named,
    )

    def note(round_, arrays):
        distance = float(np.linalg.norm(arrays["0"].numpy() - 1))
        rounds.append({"distance": distance, **(dataclasses.asdict(strategy.reports[-1]) if round_ else {})})

    start = ArrayRecord([np.zeros(SIZE, np.float32)])
    result = strategy.start(grid, start, num_rounds=config["rounds"], timeout=1200, evaluate_fn=note)
    for round_, metrics in result.train_metrics_clientapp.items():
        rounds[round_] |= metrics
    Path(config["folder"], "rounds.json").write_text(json.dumps(rounds))

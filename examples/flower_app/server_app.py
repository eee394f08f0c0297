"""The server of flower_fashion_mnist.py: FedAvg, by Flower's strategy or with containers."""

import dataclasses
import json
import os

import torch
from app_model import PLAIN, initial
from fashion_mnist import load
from federated_training import MODELS, evaluate
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from grace_ext.adapters.flower import CompressedFedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, accuracy = context.run_config, []
    torch.set_num_threads(1)
    test, net = load(config["data"], "t10k"), MODELS[config["model"]]()

    def measure(round_: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        accuracy.append([round_, evaluate(net, *test)])
        print(f"round {round_}: accuracy {accuracy[-1][1]:.2%}", flush=True)
        return MetricRecord({"accuracy": accuracy[-1][1]})

    nodes = {"fraction_evaluate": 0.0, "min_train_nodes": config["clients"], "min_available_nodes": config["clients"]}
    if config["compression"] == PLAIN:
        strategy = FedAvg(**nodes)
    else:
        strategy = CompressedFedAvg(
            config["compression"],
            memory=config["memory"],
            weights="samples",
            most_samples=config["train-samples"],
            shared_start=True,
            seed=config["seed"],
            **nodes,
        )
    strategy.start(grid, initial(context), num_rounds=config["rounds"], timeout=config["timeout"], evaluate_fn=measure)
    reports = [dataclasses.asdict(report) for report in getattr(strategy, "reports", ())]
    with open(f"{config['out']}.new", "w", encoding="utf-8") as file:
        json.dump({"accuracy": accuracy[1:], "reports": reports}, file)
    os.replace(f"{config['out']}.new", config["out"])

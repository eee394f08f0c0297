"""What server and clients of flower_fashion_mnist.py have in common."""

import torch
from federated_training import MODELS
from flwr.app import ArrayRecord, Context

PLAIN = "flower"  # instead of a spec: Flower's own FedAvg, float32


def initial(context: Context) -> ArrayRecord:
    """Make the model that training begins with, the same on the server and on all clients."""
    torch.manual_seed(context.run_config["seed"])
    return ArrayRecord(MODELS[context.run_config["model"]]().state_dict())

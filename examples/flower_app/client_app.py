"""The client of flower_fashion_mnist.py: it trains as those of fedavg_fashion_mnist.py."""

import torch
from app_model import PLAIN, initial
from fashion_mnist import read_idx, scaled
from federated_training import MODELS, Epochs, lda_split, set_vector, vector_of
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from grace_ext.adapters.flower import CompressionMod

compress = CompressionMod(start=initial)


def compress_unless_plain(message: Message, context: Context, call_next) -> Message:
    """Leave messages as they are where the server has Flower's own FedAvg; an app of one kind only needs no such function."""
    plain = context.run_config["compression"] == PLAIN
    return call_next(message, context) if plain else compress(message, context, call_next)


app = ClientApp(mods=[compress_unless_plain])


@app.train()
def train(message: Message, context: Context) -> Message:
    config, number = context.run_config, context.node_config["partition-id"]
    torch.set_num_threads(1)
    images, labels = (
        read_idx(config["data"], f"train-{name}-ubyte")[: config["train-samples"]] for name in ("images-idx3", "labels-idx1")
    )
    split = lda_split(labels.numpy(), context.node_config["num-partitions"], config["alpha"], config["seed"])
    mine = torch.from_numpy(split[number])
    net = MODELS[config["model"]]()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    epochs = Epochs(
        net,
        scaled(images[mine]),
        labels[mine].long(),
        batch=config["batch"],
        number=number,
        seed=config["seed"],
        epochs=config["local-epochs"],
        lr=config["lr"],
    )
    trained, samples = epochs(vector_of(net), message.content["config"]["server-round"])
    set_vector(net, trained)
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": samples})}
    return Message(RecordDict(content), reply_to=message)

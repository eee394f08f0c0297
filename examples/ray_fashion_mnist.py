"""Train a convolutional network on Fashion-MNIST with Ray Train and compressed gradients.

    python examples/ray_fashion_mnist.py --data DIR

Ray starts the workers. The training function differs in two lines from one without compression: the import, and the call of
compress_gradients. With --folder another run of the same --name goes on from the last epoch that is saved there.
"""

import argparse
import os
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


def train(config):
    from fashion_mnist import load, small

    from grace_ext.adapters.ray import compress_gradients

    torch.manual_seed(config["seed"])
    torch.set_num_threads(config["threads"])
    module = small()
    model = ray.train.torch.prepare_model(module)
    optimizer = torch.optim.AdamW(model.parameters(), config["lr"])
    state = compress_gradients(model, optimizer, config["compression"])
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "training.pt"), weights_only=True)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    data = TensorDataset(*(tensor[: config["train_samples"]] for tensor in load(config["data"], "train")))
    images, labels = load(config["data"], "t10k")
    loader = DataLoader(data, config["batch_size"], shuffle=True, drop_last=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    for epoch in range(first, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = F.cross_entropy(model(batch), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            accuracy = (torch.cat([module(part).argmax(1) for part in images.split(500)]) == labels).float().mean().item()
        metrics = {"epoch": epoch + 1, "accuracy": accuracy}
        if ray.train.get_context().get_world_size() > 1:
            metrics["ratio"] = state.compression_stats()["ratio"]
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}", flush=True)
                parts = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                torch.save(parts, Path(folder, "training.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def main(args):
    ray.init(num_cpus=args.workers, include_dashboard=False, object_store_memory=200_000_000, _node_ip_address=args.address)
    folder = args.folder or tempfile.mkdtemp()
    threads = max(1, len(os.sched_getaffinity(0)) // args.workers)
    config = vars(args) | {"data": os.path.abspath(args.data), "threads": threads}
    scaling = ScalingConfig(num_workers=args.workers, use_gpu=args.gpu)
    run = RunConfig(name=args.name, storage_path=os.path.abspath(folder))
    result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    ray.shutdown()
    if result.metrics and "ratio" in result.metrics:
        print(f"{result.metrics['ratio']:.0f} times fewer bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument("--compression", help="a spec; by default that of the optimizer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per worker")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, help="use only this many samples")
    parser.add_argument("--folder", help="where checkpoints are")
    parser.add_argument("--name", default="fashion-mnist", help="of the run, in that folder")
    parser.add_argument("--address", default="127.0.0.1", help="of this host, for the workers")
    main(parser.parse_args())

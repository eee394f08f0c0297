"""Train a convolutional network on Fashion-MNIST with Horovod and compressed gradients.

    horovodrun -np 2 python examples/pytorch_fashion_mnist.py --data DIR

It differs from a script for plain Horovod only in the DistributedOptimizer, which is grace_ext's.
"""

import argparse
import json
import os
import time

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from fashion_mnist import load, small
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from grace_ext.adapters.horovod_torch import DistributedOptimizer
from grace_ext.adapters.onebit_adam import OneBitAdam
from grace_ext.observe.capture import STEPS, Capture

HOROVOD = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}  # Horovod's own compression
STAGES = ("compute", "codec", "exchange")
WARM_UP = 10  # steps whose time is not counted


def cnn():
    """Make a network of 2.7 million parameters, nearly all of them in convolutions."""

    def block(inputs, outputs):
        return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()

    return nn.Sequential(
        nn.Conv2d(1, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        *block(64, 128),
        nn.MaxPool2d(2),
        *block(128, 256),
        *block(256, 256),
        nn.MaxPool2d(2),
        *block(256, 512),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(512 * 2 * 2, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


MODELS = {"small": small, "cnn": cnn}


def make_optimizer(parameters, args):
    """Make SGD with momentum, or Adam."""
    if args.optimizer in ("adam", "onebit_adam"):
        return torch.optim.Adam(parameters, args.lr)
    if args.memory.startswith("dgc"):  # this memory applies the momentum itself; weight decay outside of it must be stronger
        return torch.optim.SGD(parameters, args.lr, weight_decay=5e-4 / (1 - 0.9))
    if args.memory.startswith("ef21:"):  # so does this one, but as an average, which needs a larger learning rate
        return torch.optim.SGD(parameters, args.lr, weight_decay=5e-4)
    return torch.optim.SGD(parameters, args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)


@torch.inference_mode()
def evaluate(model, images, labels):
    """Compute accuracy and loss on the test set, of which each rank evaluates a part."""
    scores = torch.cat([model(part) for part in images.split(500)])
    right, loss = (scores.argmax(1) == labels).sum(), F.cross_entropy(scores, labels, reduction="sum")
    sums = torch.tensor([right, loss, len(labels)], dtype=torch.float64)
    right, loss, count = hvd.allreduce(sums, op=hvd.Sum, name="evaluate").tolist()
    return {"accuracy": right / count, "loss": loss / count}


class Meter:
    """Measures the bytes that this rank sends, and the parts of a step's time."""

    def __init__(self, optimizer, model, args):
        self.optimizer, self.parameters = optimizer, sum(p.numel() for p in model.parameters())
        self.communicator = args.communicator
        self.width = {"none": 4, "fp16": 2}.get(args.compression) if hvd.size() > 1 else 4  # bytes per number
        self.steps, self.seconds = 0, np.zeros(3)

    def lap(self, step, synchronize):
        """Add the seconds of a step and of its synchronize(), which with grace_ext also waits for the codec."""
        codec, exchange = 0.0, synchronize
        if not self.width:
            stages = self.optimizer.compression_stats()["last_step"]["seconds"]
            codec, exchange = sum(stages.values()) - stages["exchange"], stages["exchange"]
        self.steps += 1
        if self.steps > WARM_UP:
            self.seconds += step - codec - exchange, codec, exchange

    def report(self):
        numbers = self.steps * self.parameters  # of numbers averaged so far
        stats = {"bytes_out": numbers * self.width} if self.width else self.optimizer.compression_stats()
        layers = stats.get("compressed", {"bytes_out": 0})
        ring = 2 * (hvd.size() - 1) / hvd.size()  # how many times an allreduce and `sharded` send their payload
        copies = {"allgather": hvd.size() - 1, "hierarchical": 1}.get(self.communicator, ring)
        sent = ring * (stats["bytes_out"] - layers["bytes_out"]) + copies * layers["bytes_out"]
        seconds = dict(zip(STAGES, (self.seconds / max(1, self.steps - WARM_UP)).tolist(), strict=True))
        return {
            "steps": self.steps,
            "bytes_sent": round(sent),
            "ratio": ring * 4 * numbers / (sent or 1),
            "compressed_layers_ratio": layers.get("ratio"),
            "seconds_per_step": seconds,
        }


def main(args):
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    torch.manual_seed(args.seed)
    test = [tensor[hvd.rank() :: hvd.size()] for tensor in load(args.data, "t10k")]
    train = TensorDataset(*(tensor[: args.train_samples] for tensor in load(args.data, "train")))
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(train, None, sampler=BatchSampler(sampler, args.batch_size, drop_last=True))
    model = MODELS[args.model]()
    optimizer = make_optimizer(model.parameters(), args)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if args.optimizer == "onebit_adam":
        optimizer = OneBitAdam(
            optimizer, model.named_parameters(), args.compression, memory=args.memory, warmup_steps=args.warmup_steps
        )
    elif args.compression in HOROVOD:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), HOROVOD[args.compression])
    else:
        optimizer = DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            args.compression,
            memory=args.memory,
            communicator=args.communicator,
            schedule=dict(args.schedule),
            capture=args.capture and Capture(args.capture, args.capture_steps),
        )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.epochs * len(loader), pct_start=0.2, cycle_momentum=False
    )
    meter = Meter(optimizer, model, args)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        progress = tqdm(loader, f"epoch {epoch + 1}/{args.epochs}", unit="step", disable=hvd.rank() > 0)
        started = time.perf_counter()
        for step, (images, labels) in enumerate(progress, 1):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            produced = time.perf_counter()
            optimizer.synchronize()  # step() alone would do; this measures the time
            waited = time.perf_counter() - produced
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
            meter.lap(time.perf_counter() - started, waited)
            report = meter.report()
            saved = f", {report['ratio']:.0f}x fewer bytes" if report["ratio"] > 1.5 else ""
            progress.set_postfix_str(f"loss {loss:.3f}{saved}", refresh=False)
            if step in (len(loader) // 2, len(loader)):
                result = {"epoch": epoch + step / len(loader), **evaluate(model, *test), **report}
                if hvd.rank() == 0:
                    progress.write(f"epoch {result['epoch']:.1f}: test accuracy {result['accuracy']:.2%}")
                    with open(args.log_file, "a") as log:
                        print(json.dumps(result), file=log)
            started = time.perf_counter()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST with compressed gradients.")
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument("--compression", default="topk:0.01/rice/qsgd:7", help="a spec, or one of Horovod's own: none, fp16")
    parser.add_argument("--memory", default="residual", help="residual, none, ef21, dgc, …")
    parser.add_argument("--communicator", default="allgather", help="allgather, sharded, hierarchical, tree, …")
    parser.add_argument(
        "--schedule",
        nargs="+",
        default=[],
        metavar="OPTION=SPEC",
        type=lambda text: text.split("=", 1),
        help="schedules of options of the spec, such as density=warmup:400",
    )
    parser.add_argument("--optimizer", choices=("sgd", "adam", "onebit_adam"), default="sgd")
    parser.add_argument(
        "--warmup-steps", type=int, default=400, metavar="N", help="uncompressed steps at the start of 1-bit Adam"
    )
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, help="use only this many samples")
    parser.add_argument("--log-file", default=os.devnull, help="write a JSON line per evaluation")
    parser.add_argument("--capture", metavar="DIR", help="save rank 0's gradients there, for python -m grace_ext bench")
    parser.add_argument(
        "--capture-steps", type=int, nargs="+", default=STEPS, metavar="N", help="steps whose gradients are saved"
    )
    main(parser.parse_args())

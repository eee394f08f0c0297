"""Train a convolutional network on Fashion-MNIST with PyTorch's DistributedDataParallel and compressed gradients.

    torchrun --standalone --nproc-per-node 2 examples/pytorch_ddp_fashion_mnist.py --data DIR

It differs from a script for plain DDP only in the registered communication hook; Horovod is not needed.
"""

import argparse
import copy
import itertools
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fashion_mnist import load, small
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from grace_ext.adapters.torch_ddp import CompressionState, comm_hook

WARM_UP = 10  # steps whose time is not counted
POWERSGD_START = 2  # the earliest step that torch's hook allows


def wrap(module, args):
    """Return the module under DDP with the chosen hook, and the state of that hook."""
    if args.compression == "none":
        return DistributedDataParallel(module, gradient_as_bucket_view=True), None
    if args.compression == "fp16":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return model, None
    if args.compression == "powersgd":
        # In one bucket: over Gloo, ranks confuse the collectives that this hook starts for several buckets.
        model = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=100)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=POWERSGD_START)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model, state
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    state = CompressionState(module.named_parameters(), args.compression, memory=args.memory)
    model.register_comm_hook(state, comm_hook)
    return model, state


def make_optimizer(module, args):
    return torch.optim.SGD(module.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)


@torch.inference_mode()
def evaluate(module, images, labels):
    """Compute accuracy and loss on the test set, of which each rank evaluates a part."""
    scores = torch.cat([module(part) for part in images.split(500)])
    right, loss = (scores.argmax(1) == labels).sum(), F.cross_entropy(scores, labels, reduction="sum")
    sums = torch.tensor([right, loss, len(labels)], dtype=torch.float64)
    dist.all_reduce(sums)
    right, loss, count = sums.tolist()
    return {"accuracy": right / count, "loss": loss / count}


def train_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def compute_seconds(module, loader, args):
    """Measure the median step of a copy of the model that exchanges nothing, while all ranks compute."""
    alone = copy.deepcopy(module)
    optimizer, laps = make_optimizer(alone, args), []
    dist.barrier()
    started = time.perf_counter()
    for images, labels in itertools.islice(loader, 60):
        train_step(alone, optimizer, images, labels)
        laps.append(time.perf_counter() - started)
        started = time.perf_counter()
    return statistics.median(laps[len(laps) // 4 :])


class Meter:
    """Measures the bytes that this rank sends, and the parts of a step's time.

    compute: seconds of a step without any exchange.
    """

    def __init__(self, state, module, args, compute):
        self.state, self.compute = state, compute
        self.parameters = sum(p.numel() for p in module.parameters())
        self.width = {"none": 4, "fp16": 2}.get(args.compression)  # bytes per number
        self.steps, self.seconds, self.codec_before = 0, 0.0, 0.0

    def lap(self, seconds):
        self.steps += 1
        if self.steps == WARM_UP:
            self.codec_before = self._codec()
        if self.steps > WARM_UP:
            self.seconds += seconds

    def _codec(self):
        """Return the seconds of grace_ext's codecs so far; torch's hooks do not separate theirs from the exchange."""
        if not isinstance(self.state, CompressionState):
            return 0.0
        stages = self.state.compression_stats()["seconds"]
        return sum(stages.values()) - stages["exchange"]

    def _payloads(self):
        """Return the bytes so far that were sent by allreduce, and those by allgather."""
        if self.width:
            return self.steps * self.parameters * self.width, 0
        if isinstance(self.state, powerSGD_hook.PowerSGDState):
            return 4 * (POWERSGD_START * self.parameters + self.state.total_numel_after_compression), 0
        stats = self.state.compression_stats()
        gathered = stats.get("compressed", {"bytes_out": 0})["bytes_out"]
        return stats["bytes_out"] - gathered, gathered

    def report(self):
        reduced, gathered = self._payloads()
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()  # how many times an allreduce sends its payload
        sent = ring * reduced + (dist.get_world_size() - 1) * gathered
        counted = max(1, self.steps - WARM_UP)
        step, codec = self.seconds / counted, (self._codec() - self.codec_before) / counted
        compute = min(self.compute, step - codec)  # the machine may have been slower before the training than during it
        layers = self.state.compression_stats().get("compressed", {}) if isinstance(self.state, CompressionState) else {}
        return {
            "steps": self.steps,
            "bytes_sent": round(sent),
            "ratio": ring * 4 * self.steps * self.parameters / sent,
            "compressed_layers_ratio": layers.get("ratio"),
            "seconds_per_step": {"compute": compute, "codec": codec, "exchange": step - codec - compute},
        }


def main(args):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    torch.manual_seed(args.seed)
    test = [tensor[rank::ranks] for tensor in load(args.data, "t10k")]
    train = TensorDataset(*(tensor[: args.train_samples] for tensor in load(args.data, "train")))
    sampler = DistributedSampler(train, ranks, rank, seed=args.seed)
    loader = DataLoader(train, None, sampler=BatchSampler(sampler, args.batch_size, drop_last=True))
    module = small()
    compute = compute_seconds(module, loader, args)
    model, state = wrap(module, args)
    optimizer = make_optimizer(module, args)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.epochs * len(loader), pct_start=0.2, cycle_momentum=False
    )
    meter = Meter(state, module, args, compute)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        progress = tqdm(loader, f"epoch {epoch + 1}/{args.epochs}", unit="step", disable=rank > 0)
        started = time.perf_counter()
        for step, (images, labels) in enumerate(progress, 1):
            loss = train_step(model, optimizer, images, labels)
            schedule.step()
            meter.lap(time.perf_counter() - started)
            progress.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            if step in (len(loader) // 2, len(loader)):
                result = {"epoch": epoch + step / len(loader), **evaluate(module, *test), **meter.report()}
                if rank == 0:
                    saved = f", {result['ratio']:.0f}x fewer bytes" if result["ratio"] > 1.5 else ""
                    progress.write(f"epoch {result['epoch']:.1f}: test accuracy {result['accuracy']:.2%}{saved}")
                    with open(args.log_file, "a") as log:
                        print(json.dumps(result), file=log)
            started = time.perf_counter()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST with compressed gradients, under torchrun.")
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument(
        "--compression", default="topk:0.01/rice/qsgd:7", help="a spec, or one of torch's own: none, fp16, powersgd"
    )
    parser.add_argument("--memory", default="residual", help="residual, none, ef21, …")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, help="use only this many samples")
    parser.add_argument("--log-file", default=os.devnull, help="write a JSON line per evaluation")
    main(parser.parse_args())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # on a busy machine, a thread of Gloo that still holds a tensor aborts at Python's end (pytorch/pytorch#190489)

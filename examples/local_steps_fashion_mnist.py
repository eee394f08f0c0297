"""Train a convolutional network on Fashion-MNIST with local steps: workers exchange how their parameters have moved.

    torchrun --standalone --nproc-per-node 2 examples/local_steps_fashion_mnist.py --data DIR

It differs from a script for one process in three statements: LocalSteps(…), local.step() and local.synchronize(). Over
Horovod it would be the same, with hvd.init() in the place of init_process_group.
"""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fashion_mnist import load, small
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from grace_ext.adapters.local_steps import LocalSteps


@torch.inference_mode()
def evaluate(model, images, labels):
    """Compute accuracy and loss on the test set, of which each rank evaluates a part."""
    scores = torch.cat([model(part) for part in images.split(500)])
    right, loss = (scores.argmax(1) == labels).sum(), F.cross_entropy(scores, labels, reduction="sum")
    sums = torch.tensor([right, loss, len(labels)], dtype=torch.float64)
    dist.all_reduce(sums)
    right, loss, count = sums.tolist()
    return {"accuracy": right / count, "loss": loss / count}


def report(local, model):
    """Say what this rank has sent, and how many times fewer bytes than float32 gradients in each step these are."""
    stats = local.compression_stats()
    sent = stats["bytes_out"] + stats["other_bytes_out"]
    gradients = 4 * stats["local_steps"] * sum(p.numel() for p in model.parameters())
    return {"steps": stats["local_steps"], "rounds": stats["rounds"], "bytes_sent": sent, "ratio": gradients / max(sent, 1)}


def main(args):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    torch.manual_seed(args.seed)
    test = [tensor[rank::ranks] for tensor in load(args.data, "t10k")]
    train = TensorDataset(*(tensor[: args.train_samples] for tensor in load(args.data, "train")))
    sampler = DistributedSampler(train, ranks, rank, seed=args.seed)
    loader = DataLoader(train, None, sampler=BatchSampler(sampler, args.batch_size, drop_last=True))
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    local = LocalSteps(
        model,
        optimizer,
        args.preset,
        steps=args.steps,
        compression=args.compression,
        outer=args.outer,
        fragments=args.fragments,
        delay=args.delay,
        keep=args.keep,
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        progress = tqdm(loader, f"epoch {epoch + 1}/{args.epochs}", unit="step", disable=rank > 0)
        for images, labels in progress:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            local.step()
            progress.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        local.synchronize()
        result = {"epoch": epoch + 1, **evaluate(model, *test), **report(local, model)}
        if rank == 0:
            progress.write(f"epoch {epoch + 1}: test accuracy {result['accuracy']:.2%}, {result['ratio']:.0f}x fewer bytes")
            with open(args.log_file, "a") as log:
                print(json.dumps(result), file=log)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST with local steps, under torchrun.")
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument("--preset", default="sparseloco", help="sparseloco, diloco or fedavg")
    parser.add_argument("--steps", type=int, default=30, help="local steps in a round")
    parser.add_argument("--compression", help="a spec (default: the preset's)")
    parser.add_argument("--outer", help="an outer optimizer (default: the preset's)")
    parser.add_argument("--fragments", type=int, default=1, help="parts that are exchanged at their own offsets")
    parser.add_argument("--delay", type=int, default=0, help="steps that hide an exchange")
    parser.add_argument(
        "--keep",
        default="moves",
        type=lambda given: given if given == "moves" else float(given),
        help="what parameters keep of their own when a result is applied after the delay: moves, or a share",
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, help="use only this many samples")
    parser.add_argument("--log-file", default=os.devnull, help="write a JSON line per epoch")
    main(parser.parse_args())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # on a busy machine, a thread of Gloo that still holds a tensor aborts at Python's end (pytorch/pytorch#190489)

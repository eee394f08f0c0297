"""Train an embedding + LSTM language model on the English of Python itself, with Horovod and compressed gradients.

    horovodrun -np 2 python examples/pytorch_text.py

The text comes with every Python: its language reference (pydoc's topics) and the docstrings of its standard library. Words
are hashed to 50,000 rows of an embedding, whose gradient is inherently sparse: rows of absent words are zero.
"""

import argparse
import ast
import math
import os
import pydoc_data.topics
import re
import sysconfig
import warnings
import zlib

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from grace_ext.adapters.horovod_torch import DistributedOptimizer
from grace_ext.observe.capture import STEPS, Capture

ROWS, WIDTH = 50_000, 256
HELD_OUT = 10_000  # words at the end of the text, for the perplexity


def documents():
    """Yield the text, one document at a time, in the same order on every machine with this Python."""
    yield from pydoc_data.topics.topics.values()
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        for name in sorted(files):
            if name.endswith(".py"):
                yield from docstrings(os.path.join(folder, name))


def docstrings(path):
    try:
        with open(path, encoding="utf-8") as source, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source.read())
    except (SyntaxError, ValueError, OSError):  # some files are invalid on purpose, as in lib2to3
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def read_words() -> torch.Tensor:
    """Return the text as rows of the embedding: int64[words]."""
    words = re.findall(r"[a-z_]\w*|\S", " ".join(documents()).lower())
    row_of = {word: zlib.crc32(word.encode()) % ROWS for word in set(words)}
    return torch.from_numpy(np.fromiter((row_of[word] for word in words), np.int64, len(words)))


class Model(nn.Module):
    """26.2 million parameters, half of them in the embedding and half in the output layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.output = nn.Linear(WIDTH, ROWS)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, words):
        """Take int64[batch, length]; return the loss of predicting each next word."""
        states, _ = self.lstm(self.embedding(words[:, :-1]))
        return F.cross_entropy(self.output(states).flatten(0, 1), words[:, 1:].flatten())


def main(args):
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    torch.manual_seed(args.seed)
    words = read_words()
    train, held_out = words[:-HELD_OUT], words[-HELD_OUT:]
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        args.compression,
        memory=args.memory,
        capture=args.capture and Capture(args.capture, args.capture_steps),
    )
    generator = torch.Generator().manual_seed(args.seed * hvd.size() + hvd.rank())
    progress = tqdm(range(args.steps), unit="step", disable=hvd.rank() > 0)
    for _ in progress:
        starts = torch.randint(len(train) - args.length, (args.batch_size, 1), generator=generator)
        optimizer.zero_grad()
        loss = model(train[starts + torch.arange(args.length + 1)])
        loss.backward()
        optimizer.step()
        sent = optimizer.compression_stats()
        progress.set_postfix_str(
            f"loss {loss:.3f}" + (f", {sent['ratio']:.0f}x fewer bytes" if sent["steps"] and sent["ratio"] > 1.5 else "")
        )
    with torch.inference_mode():  # each rank evaluates its share of the held-out text
        share = held_out[: HELD_OUT // 100 * 100].view(-1, 100)[hvd.rank() :: hvd.size()]
        losses = torch.stack([model(part) for part in share.split(5)])
    loss = hvd.allreduce(losses.mean(), name="held out").item()
    if hvd.rank() == 0:
        print(f"{args.steps} steps: perplexity {math.exp(loss):.0f} on {HELD_OUT} held-out words, {ROWS} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="topk:0.01/rice/qsgd:7")
    parser.add_argument("--memory", default="residual", help="residual or none")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--length", type=int, default=32, help="words per sample")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capture", metavar="DIR", help="save rank 0's gradients there, for python -m grace_ext bench")
    parser.add_argument(
        "--capture-steps", type=int, nargs="+", default=STEPS, metavar="N", help="steps whose gradients are saved"
    )
    main(parser.parse_args())

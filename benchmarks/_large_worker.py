"""One rank of benchmarks/large.py: _large_worker.py OPTIONS, which are JSON; rank 0 writes what it has measured."""

import importlib
import io
import json
import resource
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from _transformer_tasks import Block
from torch import nn

TOKENS = 32  # in a step


class Gpt(nn.Module):
    """GPT-2 with the embedding as its head. Called without arguments, it returns the loss of random tokens."""

    def __init__(self, width: int, layers: int, heads: int, places: int = 1024, words: int = 50257):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(0, self.words.num_embeddings, (TOKENS + 1,))
        x = self.words(tokens[None, :-1]) + self.places.weight[:TOKENS]
        scores = F.linear(self.norm(self.blocks(x)), self.words.weight)
        return F.cross_entropy(scores[0].float(), tokens[1:])


class Many(nn.Module):
    """Parameters whose gradients are noise."""

    def __init__(self, count: int, size: int):
        super().__init__()
        self.list = nn.ParameterList(torch.zeros(size, size) for _ in range(count))
        self.noise = [torch.randn(size, size) for _ in range(64)]

    def forward(self) -> torch.Tensor:
        return sum((p * self.noise[i % len(self.noise)]).sum() for i, p in enumerate(self.list))


def build(model: str) -> nn.Module:
    """Make one of large.MODELS."""
    if model == "many":
        return Many(10000, 64)
    if model == "gpt2":
        return Gpt(768, 12, 12)
    with torch.device("meta"):  # to begin with, a float32 model would take twice the memory
        net = Gpt(1856, 24, 29).to(torch.bfloat16)
    net.to_empty(device="cpu")
    for p in net.parameters():
        nn.init.normal_(p, std=0.02)
    return net


def wrap(options: dict, net: nn.Module):
    """Returns the optimizer, the model to call and what has a state of grace_ext's, or None."""
    kind = getattr(torch.optim, options["optimizer"])
    optimizer, library, arguments = kind(net.parameters(), lr=1e-4), options["library"], options["arguments"]
    if options["launcher"] == "horovod":
        import horovod.torch as hvd

        if library == "horovod":
            compression = getattr(hvd.Compression, arguments["compression"])
            return hvd.DistributedOptimizer(optimizer, net.named_parameters(), compression), net, None
        from grace_ext.adapters.horovod_torch import DistributedOptimizer

        wrapped = DistributedOptimizer(optimizer, net.named_parameters(), **arguments)
        return wrapped, net, wrapped
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    outer = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    if library == "grace_ext":
        from grace_ext.adapters.torch_ddp import CompressionState, comm_hook

        state = CompressionState(net.named_parameters(), **arguments)
        outer.register_comm_hook(state, comm_hook)
        return optimizer, outer, state
    if arguments.get("hook") == "fp16":
        outer.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return optimizer, outer, None


def timed(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if options["launcher"] == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank, barrier = hvd.rank(), hvd.barrier
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, barrier = dist.get_rank(), dist.barrier
    torch.manual_seed(0)
    net = build(options["model"])
    torch.manual_seed(rank)
    first = next(net.parameters())  # the last one to get its gradient
    count = sum(p.numel() for p in net.parameters())
    if options["library"] == "grace_ext":  # before the clock starts, as the libraries' own
        importlib.import_module(
            "grace_ext.adapters." + ("horovod_torch" if options["launcher"] == "horovod" else "torch_ddp")
        )
    barrier()
    made = []
    found = {"options": options, "parameters": count, "build": timed(lambda: made.extend(wrap(options, net)))}
    optimizer, outer, stateful = made

    def step() -> float:
        """Make a step; returns the seconds after backward's last gradient. DDP's backward goes on until all is exchanged."""
        optimizer.zero_grad()
        loss = outer()
        barrier()
        begun = time.perf_counter()
        last = []
        handle = first.register_post_accumulate_grad_hook(lambda _: last.append(time.perf_counter()))
        loss.backward()
        last.append(time.perf_counter())
        handle.remove()
        optimizer.step()
        times.append(time.perf_counter() - begun)
        return time.perf_counter() - last[0]

    times: list[float] = []
    step()
    found["first"] = times.pop()
    found["after_backward"] = [step() for _ in range(options["steps"])]
    found["steps"] = times
    found["peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file = io.BytesIO()
    holder = stateful or optimizer
    found["save"] = timed(lambda: torch.save(holder.state_dict(), file))
    file.seek(0)
    found["load"] = timed(lambda: holder.load_state_dict(torch.load(file, weights_only=True)))
    one = np.ones(min(count, 1 << 28), np.float32)
    other = np.ones_like(one)
    found["memcpy"] = min(timed(lambda: np.copyto(other, one)) for _ in range(3)) * count / one.size
    barrier()
    if rank == 0:
        with open(options["out"], "w") as out:
            json.dump(found, out)


main()

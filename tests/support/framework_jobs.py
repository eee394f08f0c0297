"""What the checks of Accelerate, the Trainer and Lightning share: a model, data, and the containers that a training sends."""

import contextlib
import logging
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grace_ext import ConfigError
from grace_ext.adapters._torch.ddp_transport import GroupTransport
from grace_ext.adapters.torch_ddp import CompressionState

from .auto_control import always
from .checking import raises, run_checks

WIDTH, CLASSES, BATCH = 48, 10, 4
TOPK = "topk:0.02/rice/qsgd:7"
#: Options that an AdamW or an SGD is trained with; the first is the default, which depends on the optimizer.
METHODS = ({}, {"compression": TOPK}, {"compression": "topk:0.05/rice/raw", "memory": "ef21"}, {"compression": "powersgd:2"})


class Net(torch.nn.Module):
    """Returns logits; the loss as well if it is given labels."""

    def __init__(self, seed=1, unused=False):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(WIDTH, 150), torch.nn.Linear(150, 60)
        self.last = torch.nn.Linear(60, CLASSES)
        self.unused = torch.nn.Linear(60, 60) if unused else None
        self.in_bf16 = []  # of each forward, whether it was under autocast

    def forward(self, x, labels=None):
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        self.in_bf16.append(hidden.dtype == torch.bfloat16)
        logits = self.last(hidden).float()
        return logits if labels is None else {"loss": loss_of(logits, labels), "logits": logits}


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels)


class Samples(torch.utils.data.Dataset):
    """Numbered samples, the same on all ranks: a loader gives each rank other ones."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.labels = torch.randint(0, CLASSES, (size,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return {"x": self.x[number], "labels": self.labels[number]}


def adamw(net, lr=1e-3):
    return torch.optim.AdamW(net.parameters(), lr=lr)


def sgd(net, lr=0.05):
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def flat(net):
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


def same_on_all_ranks(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    assert all(torch.equal(rows[0], row) for row in rows), "ranks hold different bits"
    return tensor


def memories(state):
    """The memories of the buckets that are compressed."""
    return {bucket.memory.name for bucket in state._buckets.exchange.buckets if bucket.compressor.has_density}


def shared_folder(name):
    """A new folder that all ranks know, beside the job's results."""
    folder = Path(sys.argv[1], name)
    folder.mkdir(exist_ok=True)
    dist.barrier()
    return folder


class Log(logging.Handler):
    """The lines of the log "grace_ext"."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("grace_ext").addHandler(self)
        logging.getLogger("grace_ext").setLevel(logging.INFO)
        return self

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __exit__(self, *_):
        logging.getLogger("grace_ext").removeHandler(self)
        logging.getLogger("grace_ext").setLevel(logging.NOTSET)


# Containers of given gradients

SHAPES = {"first": (120, 40), "bias": (40,), "second": (7, 80, 3), "wide": (40, 90)}
STEPS = 4  # DDP rebuilds its buckets after the first one
#: Kinds that depend on bucketing, on names, steps and ranks, on the memory and on the optimizer.
SENT = (
    {},
    {"compression": "topk:0.05/rice/qsgd:7"},
    {"compression": "randomk:0.1/raw/fp16"},
    {"compression": "topk:0.05/bloom/polyfit", "memory": "ef21"},
)
#: Options that change the result, each in another way.
CHANGING = (
    {"compression": TOPK},
    *({"compression": TOPK, "communicator": communicator} for communicator in ("sharded", "tree", "hierarchical", "auto")),
    *({"compression": TOPK, "schedule": {"density": density}} for density in ("guarded:2", "kimad+:1e-06")),
    *(
        {"compression": "dense/onebit", "memory": memory, "rules": {"*": "dense/onebit"}}
        for memory in ("onebit_adam:2", "zeroone_adam:2")
    ),
)


class Given(torch.nn.Module):
    """Its gradients are given by rank and step, whatever the data. in_order: backward gives that of the first parameter first;
    else that of the last."""

    def __init__(self, rank=None, in_order=False):
        super().__init__()
        self.in_order = in_order
        self.rank = dist.get_rank() if rank is None else rank
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        self.step = 0

    def forward(self, x=None, labels=None):
        generator = np.random.default_rng([self.rank, self.step])
        self.step += 1
        given = [(p, torch.from_numpy(generator.standard_normal(p.shape, "f4"))) for p in self.parameters()]
        return {"loss": sum((p * gradient).sum() for p, gradient in (given[::-1] if self.in_order else given))}


@contextlib.contextmanager
def recorded(transport=GroupTransport):
    """The containers that this rank hands over meanwhile, by bucket and number."""
    sent, plain = {}, transport.allgather

    def allgather(self, name, payload):
        bucket = name.rsplit(".", 1)[1]
        if bucket.startswith("bucket"):
            sent[bucket, sum(one == bucket for one, _ in sent)] = payload.tobytes()
        return plain(self, name, payload)

    with mock.patch.object(transport, "allgather", allgather), mock.patch.object(transport, "can_fuse", False):
        yield sent


def train_by_ddp(net, optimizer, options):
    """STEPS steps of Given by DDP with the hook."""
    model = DistributedDataParallel(net)
    CompressionState(**options).register(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model()["loss"].backward()
        optimizer.step()


def containers_of_ddp(options, in_order=False):
    """What DDP with the hook sends of the gradients of Given."""
    net = Given(in_order=in_order)
    with recorded() as sent:
        train_by_ddp(net, adamw(net), options)
    return sent


def check_containers(train):
    """train(net, optimizer, options) makes STEPS steps with a framework, and is to send what DDP sends."""
    for options in SENT:
        expected = containers_of_ddp(options)
        assert len(expected) >= STEPS, options
        net = Given()
        with recorded() as sent:
            train(net, adamw(net), options)
        assert net.step == STEPS
        assert list(sent) == list(expected), (options, list(sent), list(expected))
        assert all(sent[key] == expected[key] for key in expected), options


def check_options(train):
    """train as in check_containers; the options are to do what they do in DDP: train alike, and write what is observed."""

    def result_of(way, options):
        net = Given()
        with always("fp16"):  # by communicator auto
            way(net, adamw(net), options)
        return same_on_all_ranks(flat(net))

    found = []
    for options in CHANGING:
        found.append(result_of(train, options))
        assert torch.equal(found[-1], result_of(train_by_ddp, options)), options
    assert len({weights.numpy().tobytes() for weights in found}) == len(CHANGING)
    folder = shared_folder("observed")
    observed = {"observe": str(folder / "records.jsonl"), "capture": str(folder / "captured")}
    assert torch.equal(result_of(train, CHANGING[0] | observed), found[0])
    dist.barrier()
    assert (folder / "records.jsonl").stat().st_size and list((folder / "captured").iterdir())


def check_disagreement(trained):
    """trained(options, make=...) makes steps with a framework, and is to raise on all ranks where they do not train alike."""
    own = dist.get_rank()
    for options, make in (
        ({"compression": f"topk:0.0{1 + own}/rice/raw"}, sgd),
        ({"seed": own}, sgd),
        ({}, adamw if own else sgd),
    ):
        with raises(ConfigError, "other parameters, specs or options than rank 0"):
            trained(options, make=make)


def run_job():
    """What a worker script does."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run_checks(sys.argv[1], dist.get_rank(), dist.get_world_size(), _count)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # on a busy machine, a thread of Gloo that still holds a tensor aborts at Python's end (pytorch/pytorch#190489)


def _count(name, number):
    total = torch.tensor([number])
    dist.all_reduce(total)
    return total.item()

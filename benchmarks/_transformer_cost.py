"""What the codecs and the optimizer's step cost, the default of Adam beside that of other optimizers; for docs/transformers.md."""

import datetime
import functools
import json
import os
import statistics
import time

import numpy as np
import torch
from _lib import as_markdown, machine
from _page import commit

from grace_ext.adapters._torch.adam_step import moments_in_memory
from grace_ext.adapters._torch.gradients import pack
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.observe.norms import energy
from grace_ext.pipeline.compressor import make_compressor
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy.defaults import ADAM, PLAIN, Default
from grace_ext.policy.guarded import EVERY
from grace_ext.rng import Stream
from grace_ext.transport import InProcessGroup

FILE = "cost.json"
RANKS, ROUNDS, WARM_UP = 4, 40, 5
WIDTH, BLOCKS, WORDS = 512, 2, 4096
DEFAULTS = {"SGD's default": PLAIN, "Adam's default": ADAM}


def tensors() -> list[Tensor]:
    """The matrices of a transformer, 8.4 M elements."""
    shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] * BLOCKS + [(WORDS, WIDTH)]
    return [Tensor(f"w{i}", rows * columns, 2, shape=(rows, columns)) for i, (rows, columns) in enumerate(shapes)]


class Subject:
    """The ranks of one default, each with a bucket of all tensors, in one process and one thread."""

    def __init__(self, default: Default):
        group = InProcessGroup(RANKS)
        self.exchanges = [Exchange(group.transport(rank), default.memory, 1 / RANKS) for rank in range(RANKS)]
        for exchange in self.exchanges:
            compressor = make_compressor(default.compression)
            exchange.set_buckets(
                [exchange.bucket("bucket", tensors(), compressor, parse_stage("communicator", "allgather"))]
            )
        self.parameters = {tensor.name: torch.nn.Parameter(torch.zeros(tensor.shape)) for tensor in tensors()}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-4)
        self.moments = moments_in_memory(self.optimizer, self.exchanges[0].buckets, self.parameters)

    @property
    def bucket(self) -> Bucket:
        return self.exchanges[0].buckets[0]

    def step(self, number: int, gradients: list[list[torch.Tensor]], out: np.ndarray) -> dict[str, float]:
        """Return rank 0's seconds of a step."""
        pending, seconds = [], {}
        for rank, exchange in enumerate(self.exchanges):
            started = time.perf_counter()
            bucket = exchange.buckets[0]
            fill = functools.partial(pack, bucket, gradients[rank], 1.0)
            pending.append(bucket.start(exchange.transport, fill, Stream(0, "bucket", number, rank)))
            if rank == 0:
                seconds["compress"] = time.perf_counter() - started
        for rank, exchange in reversed(list(enumerate(self.exchanges))):
            started = time.perf_counter()
            exchange.buckets[0].finish(pending[rank], exchange.transport, out, 1 / RANKS)
            exchange.state.commit()
            if rank == 0:
                seconds["sum"] = time.perf_counter() - started
        for p, part in zip(self.parameters.values(), np.split(out, np.cumsum(self.bucket.sizes)[:-1]), strict=True):
            p.grad = torch.from_numpy(part).view(p.shape)
        started = time.perf_counter()
        if self.moments is None:
            self.optimizer.step()
        else:
            with self.moments.left_to_memory():
                self.optimizer.step()
        return {**seconds, "optimizer": time.perf_counter() - started}


def measure(folder: str) -> str:
    """Measure both defaults in turn, and keep the medians in memcpys. Returns the path of the result."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    size = sum(tensor.size for tensor in tensors())
    ends, shapes = np.cumsum([tensor.size for tensor in tensors()])[:-1], [tensor.shape for tensor in tensors()]
    common = generator.standard_t(4, size)
    given = [(common + generator.standard_t(4, size)).astype(np.float32) for _ in range(RANKS)]
    gradients = [
        [torch.from_numpy(part).view(shape) for part, shape in zip(np.split(one, ends), shapes, strict=True)]
        for one in given
    ]
    subjects = {name: Subject(default) for name, default in DEFAULTS.items()}
    out, copy = np.empty(size, np.float32), np.empty(size, np.float32)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    memcpys, norms = [], []
    for number in range(WARM_UP + ROUNDS):
        started = time.perf_counter()
        np.copyto(copy, given[0])
        memcpys.append(time.perf_counter() - started)
        started = time.perf_counter()
        energy(given[0]), energy(copy)
        norms.append(time.perf_counter() - started)
        for name, subject in subjects.items():
            found[name].append(subject.step(number, gradients, out))
    memcpy = statistics.median(memcpys[WARM_UP:])
    rows = {
        name: {part: statistics.median(step[part] for step in steps[WARM_UP:]) / memcpy for part in steps[0]}
        for name, steps in found.items()
    }
    result = {"elements": size, "ranks": RANKS, "memcpy_ms": 1000 * memcpy, "rows": rows}
    result["guard"] = statistics.median(norms[WARM_UP:]) / memcpy
    result |= {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine()}
    path = os.path.join(folder, FILE)
    with open(path, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    return path


def section(folder: str) -> str | None:
    """Write the page's section; None where nothing was measured."""
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        return None
    with open(path) as file:
        found = json.load(file)
    rows = found["rows"]
    plain, adam = (rows[name]["compress"] + rows[name]["sum"] for name in DEFAULTS)
    steps = [rows[name]["optimizer"] for name in DEFAULTS]
    table = [
        ["in memcpys of the gradient", "compress", "sum of all ranks", "both", "AdamW's step", "all"],
        *(
            [
                name,
                *(
                    f"{value:.1f}"
                    for value in (
                        parts["compress"],
                        parts["sum"],
                        parts["compress"] + parts["sum"],
                        parts["optimizer"],
                        sum(parts.values()),
                    )
                ),
            ]
            for name, parts in rows.items()
        ),
    ]
    return (
        f"## What the codecs cost\n\nOne rank of {found['ranks']}, one thread, the matrices of a transformer "
        f"({found['elements'] / 1e6:.1f} M elements), packing, memory and second moments included; both defaults in turn. A "
        f"memcpy took {found['memcpy_ms']:.2f} ms.\n\n{as_markdown(table)}\n\nThe codecs of Adam's default cost "
        f"{adam / plain:.2f} times those of SGD's. They do a part of AdamW's work, so that codecs and step together cost "
        f"{(adam + steps[1]) / (plain + steps[0]):.2f} times as much. The schedule `guarded` measures its signal in one step of "
        f"{EVERY}, in {found['guard']:.1f} memcpys: {found['guard'] / EVERY:.2f} in each step, "
        f"{100 * found['guard'] / EVERY / (adam + steps[1]):.1f} % of codecs and optimizer alone. Measured on "
        f"{found['date']} on {found['machine']}, by `python benchmarks/transformer.py cost`."
    )

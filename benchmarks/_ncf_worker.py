"""One rank of a run of benchmarks/ncf.py, which starts it: _ncf_worker.py OPTIONS, with the options as JSON.

It trains NeuMF (He et al., Neural Collaborative Filtering, WWW 2017) on who has rated what in MovieLens 100k. For each user, the last
film is held out: the hit rate is how often it is among the ten best of it and 99 others that the user has not seen. Rank 0 writes
the result, a JSON object, to options["out"]: with options["measure"] how long steps take, else how good the model is.
"""

import json
import statistics
import sys
import time

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

from grace_ext.adapters.horovod_torch import DistributedOptimizer

FACTORS, TOWER = 64, (256, 128, 64)
NEGATIVES, OTHERS, BEST = 4, 99, 10
RATE = 1e-3  # Adam's
BEFORE = 10  # steps that are not timed


class Ratings:
    """Who has seen what. path: of ml-100k.inter, with a line "user, item, rating, time" for each rating after its first line."""

    def __init__(self, path: str):
        with open(path) as file:
            lines = [line.split("\t") for line in file.read().splitlines()[1:]]
        users, items = ([row[column] for row in lines] for column in (0, 1))
        numbers = [{name: number for number, name in enumerate(sorted(set(names)))} for names in (users, items)]
        self.users, self.items = map(len, numbers)
        seen = np.array(
            [
                [numbers[0][user], numbers[1][item], int(float(row[3]))]
                for user, item, row in zip(users, items, lines, strict=True)
            ]
        )
        seen = seen[np.lexsort((seen[:, 1], seen[:, 2], seen[:, 0]))]
        is_last = np.append(seen[1:, 0] != seen[:-1, 0], True)
        self.train, last = torch.from_numpy(seen[~is_last, :2]), seen[is_last]
        known = np.zeros((self.users, self.items), bool)
        known[seen[:, 0], seen[:, 1]] = True
        random = np.random.default_rng(0)
        others = np.stack([random.choice(np.flatnonzero(~known[user]), OTHERS, replace=False) for user in last[:, 0]])
        self.asked = torch.from_numpy(last[:, 0])
        self.candidates = torch.from_numpy(np.column_stack([last[:, 1], others]))

    def batch(self, generator: torch.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Users, items and labels: rated ones, and four times as many of any items."""
        rated = self.train[torch.randint(len(self.train), (size // (1 + NEGATIVES),), generator=generator)]
        users = rated[:, 0].repeat(1 + NEGATIVES)
        others = torch.randint(self.items, (NEGATIVES * len(rated),), generator=generator)
        labels = torch.zeros(len(users))
        labels[: len(rated)] = 1
        return users, torch.cat([rated[:, 1], others]), labels


class NeuMF(nn.Module):
    """Matrix factorization and a tower of layers, each with embeddings of its own."""

    def __init__(self, users: int, items: int):
        super().__init__()
        self.users, self.items = (nn.Embedding(count, FACTORS) for count in (users, items))
        self.tower_users, self.tower_items = (nn.Embedding(count, TOWER[0] // 2) for count in (users, items))
        for table in (self.users, self.items, self.tower_users, self.tower_items):
            nn.init.normal_(table.weight, std=0.01)
        layers = [
            layer for wide, narrow in zip(TOWER, TOWER[1:], strict=False) for layer in (nn.Linear(wide, narrow), nn.ReLU())
        ]
        self.tower, self.last = nn.Sequential(*layers), nn.Linear(FACTORS + TOWER[-1], 1)

    def forward(self, users, items):
        product = self.users(users) * self.items(items)
        tower = self.tower(torch.cat([self.tower_users(users), self.tower_items(items)], dim=-1))
        return self.last(torch.cat([product, tower], dim=-1)).squeeze(-1)


def hit_rate(model: NeuMF, ratings: Ratings) -> float:
    with torch.no_grad():
        scores = model(ratings.asked[:, None].expand_as(ratings.candidates), ratings.candidates)
    return float((scores[:, 1:] >= scores[:, :1]).sum(dim=1).lt(BEST).float().mean())


def codec_seconds(optimizer) -> float:
    """Return how many seconds all steps have taken but for the exchange. In the first ones kernels are loaded, or compiled."""
    return sum(taken for stage, taken in optimizer.compression_stats()["seconds"].items() if stage != "exchange")


def main() -> None:
    options = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    ratings = Ratings(options["ratings"])
    model = NeuMF(ratings.users, ratings.items)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    own = options["library"] == "horovod"
    if own:
        compression = getattr(hvd.Compression, options["arguments"]["compression"])
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    elif options["library"] == "grace_ext":
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), **options["arguments"])
    generator = torch.Generator().manual_seed(1000 * options["seed"] + hvd.rank())
    best, density, laps, loss_of = 0.0, [], [], nn.BCEWithLogitsLoss()
    uncounted, before = min(BEFORE, options["steps"] - 1), 0.0  # steps whose codecs' time is left out, and that time
    for step in range(1, options["steps"] + 1):
        users, items, labels = ratings.batch(generator, options["batch"])
        started = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model(users, items), labels).backward()
        laps.append(time.perf_counter() - started)
        if not options["measure"] and step % options["every"] == 1:
            density.append(statistics.mean(float((p.grad != 0).float().mean()) for p in model.parameters() if p.ndim > 1))
        started = time.perf_counter()
        optimizer.step()
        laps[-1] += time.perf_counter() - started
        if step == uncounted and options["library"] == "grace_ext":
            before = codec_seconds(optimizer)
        if not options["measure"] and step % options["every"] == 0:
            best = max(best, hit_rate(model, ratings))
            if hvd.rank() == 0:
                print(f"[ncf] step {step}/{options['steps']}: hit rate {best:.4f} at best", flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    found = {"parameters": parameters, "hit_rate": best, "density": statistics.mean(density or [0])}
    found["ms_per_step"] = 1000 * statistics.median(laps[BEFORE:] or laps)
    if own:
        found["bytes_sent"] = parameters * options["steps"] * {"none": 4, "fp16": 2}[options["arguments"]["compression"]]
    elif options["library"] == "grace_ext":
        found["bytes_sent"] = optimizer.compression_stats()["bytes_out"]
        found["ms_codecs"] = 1000 * (codec_seconds(optimizer) - before) / (options["steps"] - uncounted)
    if hvd.rank() == 0:
        with open(options["out"], "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()

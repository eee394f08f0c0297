"""The results of benchmarks/transformer.py: files by task, method and seed."""

import dataclasses
import glob
import json
import os
import statistics

from _lib import ROOT

from grace_ext.memory import make_memory
from grace_ext.memory.momentum import Momentum
from grace_ext.policy.defaults import ADAM
from grace_ext.policy.guarded import Guarded

RESULTS = os.path.join(ROOT, "benchmarks", "results", "transformers")
DENSE = "horovod-fp32"
#: Memories with which Adam makes its own step, and how much more a lag weighs then.
FED_BACK, OWN_MOMENT = ("residual", "momentum"), 10


def path_of(task: str, method: str, seed: int, folder: str = RESULTS) -> str:
    return os.path.join(folder, f"{task}_{method}_{seed}.json")


@dataclasses.dataclass
class Row:
    """All seeds of a method on a task. runs: seed -> result."""

    label: str
    runs: dict[int, dict]

    def last(self, what: str) -> list[float]:
        """Return a figure of the last evaluation, for each seed."""
        return [run["curve"][-1][what] for _, run in sorted(self.runs.items())]

    @property
    def fewer_bytes(self) -> float:
        """How many times fewer bytes than the float32 gradients of all steps have been handed to collectives."""
        return statistics.mean(
            4 * run["parameters"] * run["steps"] / run["curve"][-1]["bytes_sent"] for run in self.runs.values()
        )

    @property
    def ms_per_step(self) -> float:
        return statistics.mean(1000 * run["curve"][-1]["seconds"] / run["steps"] for run in self.runs.values())


def read(task: str, folder: str = RESULTS) -> dict[str, Row]:
    """Read the rows of a task by the names of the methods."""
    rows: dict[str, Row] = {}
    for path in sorted(glob.glob(os.path.join(folder, f"{task}_*.json"))):
        with open(path) as file:
            found = json.load(file)
        _, method, seed = os.path.basename(path)[: -len(".json")].split("_")
        rows.setdefault(method, Row(found["label"], {})).runs[int(seed)] = found
    return rows


def difference(row: Row, dense: Row, measure: str) -> float:
    """Return how much worse than without compression, mean over the seeds that both have: percent of the loss, or points."""
    seeds = row.runs.keys() & dense.runs.keys()
    mine, theirs = (statistics.mean(one.runs[seed]["curve"][-1][measure] for seed in seeds) for one in (row, dense))
    return 100 * (mine / theirs - 1) if measure == "loss" else 100 * (theirs - mine)


def lags(run: dict) -> list[tuple[int, float]] | None:
    """Return the lag by step; nothing where nothing waits, None where it was not recorded."""
    return [] if run["library"] == "horovod" else [(step, lag) for step, lag in run.get("lags", []) if step] or None


def lag_signal(run: dict) -> float | None:
    """Return the mean of lag / sqrt(step); None where it was not recorded."""
    found = lags(run)
    return None if found is None else statistics.mean([lag / step**0.5 for step, lag in found] or [0.0])


def signal(run: dict) -> float | None:
    """Return the guard's signal, the mean over the run; None without records.

    It is the lag over what `guarded` allows, but at least 1, times the square of what the memory enlarges Adam's steps by. Where
    Adam's own second moment is made of what arrives, a tenth is allowed.
    """
    found, arguments = lags(run), run["arguments"]
    if found is None:
        return None
    allowed, gain = Guarded().share, 1.0
    if run["library"] == "grace_ext":
        memory = make_memory(arguments.get("memory", "residual" if "compression" in arguments else ADAM.memory))
        allowed /= OWN_MOMENT if memory.name in FED_BACK else 1
        gain = memory.step_gain if isinstance(memory, Momentum) else 1.0
    return gain**2 * statistics.mean([max(lag / (allowed * step**0.5), 1.0) for step, lag in found] or [1.0])


def spearman(xs: list[float], ys: list[float]) -> float:
    """Return the rank correlation; ties have their mean rank."""
    ranks = [
        [statistics.mean(i for i, other in enumerate(sorted(column)) if other == one) for one in column]
        for column in (xs, ys)
    ]
    return statistics.correlation(*ranks)


def steps_to(run: dict, accuracy: float) -> float | None:
    """Return after how many steps a run reached an accuracy, between two evaluations; None if it did not."""
    before = {"step": 0, "accuracy": 0.0}
    for now in run["curve"]:
        if now["accuracy"] >= accuracy:
            share = (accuracy - before["accuracy"]) / (now["accuracy"] - before["accuracy"])
            return before["step"] + share * (now["step"] - before["step"])
        before = now
    return None

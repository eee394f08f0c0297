"""The methods of benchmarks/local_steps.py, and what was measured of them."""

import dataclasses
import glob
import json
import os
import statistics

from _transformer_results import DENSE
from _transformer_results import read as runs_of_transformer

LENGTHS = (5, 15, 30, 100)  # local steps in a round
FP16, DEFAULT = "horovod-fp16", "default"
ALONE = "alone"  # no exchange: what compute alone takes
#: The default over DDP, and with Horovod's own collectives whatever the link: of steps only, since they need as many.
DDP, HOROVODS = "default-ddp", "default-horovod"
LONGER = "-longer"  # how names end of trainings that are LENGTHENED times as long
LENGTHENED = 1.1


def methods() -> dict[str, tuple[str, str, dict]]:
    """List the methods: name of the result -> label, library and its arguments."""
    found = {
        DENSE: ("Horovod float32, each step", "horovod", {"compression": "none"}),
        FP16: ("Horovod fp16, each step", "horovod", {"compression": "fp16"}),
        DEFAULT: ("grace_ext, default, each step", "grace_ext", {}),
        DDP: ("grace_ext, default, each step, over DDP", "ddp", {}),
        HOROVODS: ('grace_ext, default, each step, backend="horovod"', "grace_ext", {"backend": "horovod"}),
        ALONE: ("no exchange", "alone", {}),
    }
    for steps in LENGTHS:
        found[f"fedavg-{steps}"] = (f"plain averaging, H = {steps}", "local", {"preset": "fedavg", "steps": steps})
        found[f"diloco-{steps}"] = (f"DiLoCo, H = {steps}", "local", {"preset": "diloco", "steps": steps})
        found[f"sparseloco-{steps}"] = (f"SparseLoCo, H = {steps}", "local", {"preset": "sparseloco", "steps": steps})
        found[f"weighted-{steps}"] = (f"SparseLoCo, weighted mean, H = {steps}", "local", {"steps": steps, "weighted": True})
        ramp = {"steps": steps, "ramp": max(1, steps // 20)}
        found[f"ramp-{steps}"] = (f"SparseLoCo, short rounds at first, H = {steps}", "local", ramp)
        found[f"fedavg-adam-{steps}"] = (
            f"plain averaging, LocalAdamW, H = {steps}",
            "local",
            {"preset": "fedavg", "steps": steps, "local_adamw": True},
        )
        label, adam = f"SparseLoCo, LocalAdamW, H = {steps}", {"steps": steps, "local_adamw": True}
        found[f"adam-{steps}"] = (label, "local", adam)
        found[f"adam-{steps}{LONGER}"] = (f"{label}, {LENGTHENED:g} times the steps", "local", adam)
        delay = min(10, steps // 2)
        delayed = f"{label}, delay {delay}", "local", adam | {"delay": delay}
        found[f"delayed-{steps}"] = delayed
        found[f"delayed-{steps}{LONGER}"] = (f"{delayed[0]}, {LENGTHENED:g} times the steps", *delayed[1:])
        fragments = min(3, steps // 2)
        delay = min(10, steps // fragments - 1)
        streaming = {"steps": steps, "fragments": fragments, "delay": delay}
        found[f"streaming-{steps}"] = (f"SparseLoCo, streaming, H = {steps}, delay {delay}", "local", streaming)
    return found


def steps_of(method: str, steps: int) -> int:
    """How many steps a method trains where others train so many."""
    return round(steps * LENGTHENED) if method.endswith(LONGER) else steps


def is_alone(step: int, options: dict) -> bool:
    """Whether a step is one without an exchange, which is measured beside those with one."""
    return "turn" in options and step > options["settled"] and (step - options["settled"] - 1) // options["turn"] % 2 == 1


def path_of(folder: str, task: str, method: str, which: str) -> str:
    """Name a result. which: "seed0", …, or the links."""
    return os.path.join(folder, f"{task}_{method}_{which}.json")


def steps_to(curve: list[dict], measure: str, target: float) -> float | None:
    """Return after how many steps a run was as good as the target, between two evaluations; None if it was not."""
    before = None
    for now in curve:
        reached = now[measure] <= target if measure == "loss" else now[measure] >= target
        if reached and before is None:
            return now["step"]
        if reached:
            share = (target - before[measure]) / (now[measure] - before[measure])
            return before["step"] + share * (now["step"] - before["step"])
        before = now
    return None


@dataclasses.dataclass
class Measured:
    """What was measured of a method on a task. runs: by seed. steps: the results of single steps, by the name of the links."""

    label: str
    runs: dict[int, dict]
    steps: dict[str, dict]

    @property
    def milliseconds(self) -> dict[str, float]:
        """Of a step, by the name of the links."""
        return {link: result["ms_per_step"] for link, result in self.steps.items()}

    def steps_to_the_end_of(self, dense: "Measured", measure: str) -> float | None:
        """Return the mean number of steps until a run is as good as the dense one of its seed is at its end; None if one is not."""
        reached = [
            steps_to(found["curve"], measure, dense.runs[seed]["curve"][-1][measure])
            for seed, found in self.runs.items()
            if seed in dense.runs
        ]
        return None if not reached or None in reached else statistics.mean(reached)


def _results(results: str, task: str, method: str) -> dict[str, dict]:
    """Read what was measured of a method: by "seed0", …, and by the links."""
    found = {}
    for path in sorted(glob.glob(path_of(results, task, method, "*"))):
        with open(path) as file:
            found[os.path.basename(path)[:-5].rsplit("_", 1)[1]] = json.load(file)
    return found


def measured(results: str, transformers: str, task: str) -> dict[str, Measured]:
    """Read what there is of a task, by method."""
    per_step, found = runs_of_transformer(task, transformers), {}
    for method, (label, library, _) in methods().items():
        own = _results(results, task, method)
        runs = {int(which[4:]): result for which, result in own.items() if which.startswith("seed")}
        if library != "local" and method in per_step:
            runs = dict(per_step[method].runs) | runs
        links = {which: result for which, result in own.items() if not which.startswith("seed")}
        if method.endswith(LONGER) and (shorter := found.get(method.removesuffix(LONGER))):
            links = shorter.steps  # a step takes as long
        if runs or links and not method.endswith(LONGER):
            found[method] = Measured(label, runs, links)
    return found

"""The measurements of benchmarks/cluster.py, and what follows from them."""

import glob
import json
import os
import statistics

#: The spec of the fewest bytes, in docs/choosing.md.
FEWEST = "topk:0.01/auto/lloyd:0.05"
#: name -> label, library, arguments
CONFIGURATIONS = {
    "horovod-fp32": ("Horovod fp32", "horovod", {"own": "none"}),
    "horovod-fp16": ("Horovod fp16", "horovod", {"own": "fp16"}),
    "ddp-powersgd": ("DDP, PowerSGD rank 4", "ddp", {"hook": "powersgd"}),
    "ddp-fp16": ("DDP, fp16", "ddp", {"hook": "fp16"}),
    "ddp-allgather": ("grace_ext over DDP, default (allgather)", "ddp", {"communicator": "allgather"}),
    "ddp-sharded": ("grace_ext over DDP, sharded", "ddp", {"communicator": "sharded"}),
    "ddp-auto": ("grace_ext over DDP, auto", "ddp", {"communicator": "auto"}),
    "ddp-fewest": ("grace_ext over DDP, fewest bytes (auto)", "ddp", {"communicator": "auto", "compression": FEWEST}),
    "allgather": ("grace_ext, default (allgather)", "horovod", {"communicator": "allgather"}),
    "sharded": ("grace_ext, sharded", "horovod", {"communicator": "sharded"}),
    "auto": ("grace_ext, auto", "horovod", {"communicator": "auto"}),
}
OURS = ("allgather", "sharded", "auto")
OVER_DDP = ("ddp-allgather", "ddp-sharded", "ddp-auto", "ddp-fewest")
#: The most times a step of DDP's hooks, by rate.
RIVALS = {"100mbit": {"ddp-fp16": 1 / 12, "ddp-powersgd": 0.7}, "1gbit": {"ddp-fp16": 0.4, "ddp-powersgd": 0.7}}
BASELINE = "horovod-fp16"
SIDE_BY_SIDE = "side-by-side"  # grace_ext's configurations
WITH_HOROVOD = "side-by-side-horovod"  # with Horovod's own, where those are nearly as fast
#: In the order in which they run: the first rate's curves are used for all.
RATES = {"none": "unlimited", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
MODELS = {
    "mlp": "MLP, 5.8 M parameters, Fashion-MNIST",
    "cnn": "CNN, 6.5 M parameters, Fashion-MNIST",
    "text": "Embedding and LSTM, 7.3 M parameters, text",
}
POINTS = 0.005  # the target is this much below the best accuracy of the baseline
SHARDED_LOSES = 0.5  # the most points that it may lose
UNKNOWN = "AMD EPYC, 2 cores, of a kind that was not noted"  # of results that do not say it
AUTO = 1.05  # the most times the best fixed choice


def path_of(folder: str, model: str, rate: str, config: str) -> str:
    return os.path.join(folder, f"{model}_{rate}_{config}.json")


class Results:
    """All results in a folder."""

    def __init__(self, folder: str):
        self._runs = {}
        for path in glob.glob(os.path.join(folder, "*_*_*.json")):
            with open(path) as file:
                self._runs[tuple(os.path.basename(path)[: -len(".json")].split("_"))] = json.load(file)

    def get(self, model: str, rate: str, config: str) -> dict | None:
        return self._runs.get((model, rate, config))

    def models(self) -> list[str]:
        return [model for model in MODELS if any(key[0] == model for key in self._runs)]

    def rates(self, model: str) -> list[str]:
        return [rate for rate in RATES if any(key[:2] == (model, rate) for key in self._runs)]

    def configs(self, model: str, rate: str) -> list[str]:
        return [config for config in CONFIGURATIONS if (model, rate, config) in self._runs]

    def dates(self, model: str) -> list[str]:
        return sorted({run["date"] for key, run in self._runs.items() if key[0] == model})

    def machines(self, model: str) -> list[str]:
        """Return the descriptions of the machines that it was measured on."""
        return sorted({run.get("machine", UNKNOWN) for key, run in self._runs.items() if key[0] == model})

    def step(self, model: str, rate: str, config: str) -> float:
        """Return the seconds of a step, the median of rank 0."""
        return statistics.median(self._runs[model, rate, config]["laps"])

    def compute(self, model: str) -> float:
        """Return the seconds of a step without exchange, the median of all runs of a model."""
        return statistics.median(run["compute"] for key, run in self._runs.items() if key[0] == model and "compute" in run)

    def codec(self, model: str, rate: str, config: str) -> float:
        """Return the seconds of grace_ext's stages without the exchange."""
        stages = self._runs[model, rate, config]["stages"]
        return sum(seconds for stage, seconds in stages.items() if stage != "exchange")

    def is_cut(self, model: str, rate: str, config: str) -> bool:
        return not self._runs[model, rate, config]["curve"]

    def curve(self, model: str, rate: str, config: str) -> list[tuple[float, float]]:
        """Return (seconds, accuracy) of each evaluation.

        A run that was cut takes the accuracies from the run on unlimited links, at its own median step; without that run, it
        has none.
        """
        own = self.get(model, rate, config)
        if own and own["curve"]:
            return [(seconds, accuracy) for _, seconds, accuracy in own["curve"]]
        free = self.get(model, "none", config)
        step = self.step(model, rate, config)
        return [(number * step, accuracy) for number, _, accuracy in free["curve"]] if free else []

    def target(self, model: str) -> float | None:
        """Return the accuracy that all have to reach."""
        baseline = self.get(model, "none", BASELINE)
        return max(accuracy for *_, accuracy in baseline["curve"]) - POINTS if baseline and baseline["curve"] else None

    def seconds_to(self, model: str, rate: str, config: str) -> float | None:
        """Return the seconds until the target, interpolated between evaluations; None if not reached or not known."""
        target, before = self.target(model), (0.0, 0.0)
        if target is None:
            return None
        for seconds, accuracy in self.curve(model, rate, config):
            if accuracy >= target:
                return before[0] + (seconds - before[0]) * (target - before[1]) / (accuracy - before[1])
            before = seconds, accuracy
        return None

    def side_by_side(self, model: str, rate: str, comparison: str = SIDE_BY_SIDE) -> dict[str, list[float]]:
        """Return the step seconds of each instance, by configuration."""
        run = self.get(model, rate, comparison) or {"instances": {}}
        return {config: run["instances"][config] for config in CONFIGURATIONS if config in run["instances"]}

    def verdicts(self) -> list[tuple[str, str, float, dict[str, float]]]:
        """Return (what, of what, the most allowed, what was measured by configuration) for each bar that can be judged."""
        found = []
        for rate, step, whole in (("100mbit", 1 / 15, 1 / 10), ("1gbit", 1 / 3, 1 / 2.5)):
            if self.get("mlp", rate, BASELINE):
                ours = [config for config in OURS if self.get("mlp", rate, config)]
                base = self.step("mlp", rate, BASELINE)
                found.append(
                    (
                        f"MLP, {RATES[rate]}: seconds per step",
                        "Horovod fp16",
                        step,
                        {config: self.step("mlp", rate, config) / base for config in ours},
                    )
                )
                base = self.seconds_to("mlp", rate, BASELINE)
                times = {config: self.seconds_to("mlp", rate, config) for config in ours}
                if base:
                    found.append(
                        (
                            f"MLP, {RATES[rate]}: time to the same accuracy",
                            "Horovod fp16",
                            whole,
                            {config: time / base if time else float("inf") for config, time in times.items()},
                        )
                    )
        for model in self.models():
            free = {config: run["curve"] for config in OURS if (run := self.get(model, "none", config))}
            if "sharded" in free and "allgather" in free:
                best = {config: 100 * max(accuracy for *_, accuracy in curve) for config, curve in free.items()}
                found.append(
                    (
                        f"{MODELS[model].split(',')[0]}: points of accuracy lost by sharded",
                        "allgather",
                        SHARDED_LOSES,
                        {"sharded": best["allgather"] - best["sharded"]},
                    )
                )
            for rate in self.rates(model):
                what = f"{MODELS[model].split(',')[0]}, {RATES[rate]}: step of auto"
                ours = self._auto(model, rate, SIDE_BY_SIDE, OURS)
                horovods = self._auto(model, rate, WITH_HOROVOD, ("horovod-fp32", BASELINE))
                if rate == "none" and horovods:
                    found.append((what, "Horovod's best", AUTO, {"auto": horovods}))
                if ours or horovods:
                    found.append((what, "best fixed choice", AUTO, {"auto": max(filter(None, (ours, horovods)))}))
        return found

    def _models_and_rates(self) -> list[tuple[str, str]]:
        return [(model, rate) for model in self.models() for rate in self.rates(model)]

    def verdicts_over_ddp(self) -> list[tuple[str, str, float, dict[str, float]]]:
        """Return the same as `verdicts` for grace_ext over DDP."""
        found = []
        for model, rate in self._models_and_rates():
            what = f"{MODELS[model].split(',')[0]}, {RATES[rate]}: seconds per step"
            steps = {config: self.step(model, rate, config) for config in self.configs(model, rate)}
            ours = {config: steps[config] for config in OVER_DDP if config in steps}
            for rival, most in RIVALS.get(rate, {}).items():
                if rival in steps and ours:
                    ratios = {config: step / steps[rival] for config, step in ours.items()}
                    found.append((what, CONFIGURATIONS[rival][0], most, ratios))
            others = [step for config, step in steps.items() if config.startswith("ddp-") and config != "ddp-auto"]
            if rate == "none" and "ddp-auto" in ours and others:
                found.append((what, "the fastest over DDP", AUTO, {"ddp-auto": ours["ddp-auto"] / min(others)}))
            over_horovod = {config: config.removeprefix("ddp-") for config in ours}
            ratios = {config: ours[config] / steps[same] for config, same in over_horovod.items() if same in steps}
            if ratios:
                found.append((what, "the same over Horovod", 1.0, ratios))
        return found

    def _auto(self, model: str, rate: str, comparison: str, configs: tuple[str, ...]) -> float | None:
        """Return its step time relative to the best of these, if they were compared."""
        steps = self.side_by_side(model, rate, comparison)
        fixed = {config: steps[config] for config in configs if config in steps and config != "auto"}
        return against_best(steps["auto"], fixed) if fixed and "auto" in steps else None


def against_best(own: list[float], others: dict[str, list[float]]) -> float:
    """Return the step time relative to the best of the others.

    For each instance, the best one is chosen by the other instances: the smallest of several measurements is biased, but a
    measurement that took no part in the choice is not.
    """
    chosen = []
    for number in range(len(own)):
        rest = {config: statistics.mean(steps[:number] + steps[number + 1 :]) for config, steps in others.items()}
        chosen.append(others[min(rest, key=rest.get)][number])
    return sum(own) / sum(chosen)

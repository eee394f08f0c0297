"""The command `python -m grace_ext simulate`."""

import argparse
import csv
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .._util.text_table import text_table
from .._util.units import count, seconds
from ..errors import ConfigError
from ..pipeline.compressor import make_compressor
from ..policy.kimad import uniform_density
from . import traces
from .policies import FixedDensity, GradientDescent, Kimad, KimadPlus, Optimal, Sender
from .run import Round, Setting, simulate
from .tasks import FashionMnist, Quadratic

#: The adaptive policies by name. By default "ef21" has the density with which it sends as many bytes as the first of them.
ADAPTIVE = {"kimad": Kimad, "kimad+": KimadPlus, "optimal": Optimal}
#: The policies that are compared by default, and all that there are.
POLICIES = ("ef21", "kimad", "kimad+")
ALL = (*POLICIES, "optimal", "gd")
_PILOT = 5  # the pilot run of `equal_bytes` has one step for this many of the run
_RATES = {"quadratic": 0.5, "cnn": 0.05}  # learning rates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser.

    Args:
        parser: The parser of the command.
    """
    add = parser.add_argument
    add(
        "--task",
        choices=_RATES,
        default="quadratic",
        help="the quadratic of equation (10) of Kimad, or a network on Fashion-MNIST",
    )
    add("--data", metavar="DIR", help="folder of Fashion-MNIST, for cnn")
    add(
        "--workers",
        type=count,
        nargs="+",
        default=[4],
        metavar="M",
        help="numbers of workers; one simulation for each (default: 4)",
    )
    add(
        "--policies",
        nargs="+",
        choices=ALL,
        default=list(POLICIES),
        help="the policies to compare (default: ef21, kimad and kimad+)",
    )
    add(
        "--density",
        type=float,
        metavar="X",
        help="density of ef21 (default: the one with which it sends as many bytes as the first adaptive policy)",
    )
    add("--time", type=seconds, default=0.1, metavar="T", help="step time that adaptive policies aim at (default: 100ms)")
    add(
        "--compute",
        type=seconds,
        default=0.05,
        metavar="T",
        help="time that a worker takes for its gradient (default: 50ms)",
    )
    add("--steps", type=count, default=100, metavar="N", help="number of steps (default: %(default)s)")
    add(
        "--up",
        default="sinusoid:30mbit:330mbit:2s",
        metavar="TRACE",
        help=f"bandwidth to the server: {traces.SPECS} (default: %(default)s); the file has rows of seconds and Mbit/s",
    )
    add("--down", metavar="TRACE", help="bandwidth from the server (default: as --up)")
    add(
        "--noise",
        type=float,
        default=0.0,
        metavar="X",
        help="lognormal noise of each link: the standard deviation of its logarithm (default: none)",
    )
    add("--phases", action="store_true", help="let each worker's traces begin at another point")
    add(
        "--congestion",
        type=float,
        default=1.0,
        metavar="X",
        help="how many times as long a byte takes from the server, because it sends to all; 0: nothing (default: 1)",
    )
    add(
        "--warmup",
        type=int,
        default=0,
        metavar="N",
        help="number of exact first steps, which start the estimates (default: 0)",
    )
    add("--oracle", action="store_true", help="tell policies the bandwidth, instead of letting them measure it")
    add(
        "--compression",
        default=Setting.compression,
        metavar="SPEC",
        help="the compressor whose density is chosen (default: %(default)s)",
    )
    add(
        "--rate",
        type=float,
        metavar="X",
        help=f"learning rate (default: {', '.join(f'{rate} for {task}' for task, rate in _RATES.items())})",
    )
    add("--decay", action="store_true", help="let the learning rate decay linearly to 0")
    add(
        "--dimension",
        type=count,
        default=3000,
        metavar="N",
        help="number of elements of the quadratic (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="seed of all random numbers (default: %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="write every step to a CSV file")
    add("--plot", type=Path, metavar="FILE", help="plot the steps (needs matplotlib)")


def run(arguments, progress: Callable[[int, int, str], None]) -> int:
    """Run the command.

    Args:
        arguments: What `add_arguments` asks for.
        progress: Called with (done, total, what) at each hundredth of the steps.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: An argument is out of range, an output folder does not exist, or something needed is missing.
    """
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'grace_ext[plots]'")
    for path in (arguments.csv, arguments.plot):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
    if arguments.task == "cnn" and arguments.data is None:
        raise ConfigError("--task cnn needs --data, the folder of Fashion-MNIST")
    task = FashionMnist(arguments.data, seed=arguments.seed) if arguments.task == "cnn" else Quadratic(arguments.dimension)
    found = {}
    for workers in arguments.workers:
        setting = setting_of(workers, arguments)
        done = _Counter(progress, len(arguments.policies) * setting.steps, workers)
        found.update(
            {
                (workers, label): records
                for label, records in compare(
                    task, setting, arguments.policies, arguments.time, arguments.density, done
                ).items()
            }
        )
    if arguments.csv:
        write_csv(arguments.csv, found)
    if arguments.plot:
        from .plot import draw

        draw(found, arguments.plot)
    print(table(found))
    return 0


class _Counter:
    """Counts the steps of all policies, and reports each hundredth of them."""

    def __init__(self, progress, total: int, workers: int):
        self._progress, self._total, self._workers, self._done = progress, total, workers, 0

    def __call__(self, record: Round) -> None:
        self._done += 1
        if self._done * 100 // self._total > (self._done - 1) * 100 // self._total or self._done == self._total:
            self._progress(self._done, self._total, f"steps, {self._workers} workers: loss {record.loss:.4g}")


def setting_of(workers: int, arguments) -> Setting:
    """Make the setting for a number of workers.

    Each worker's links have their own noise and phase. Those of the first workers are the same for any number of workers.

    Args:
        workers: Number of workers.
        arguments: What `add_arguments` asks for.

    Returns:
        The setting.
    """
    up = traces.parse(arguments.up)
    down = traces.parse(arguments.down) if arguments.down else up
    links = {"up": [], "down": []}
    for worker in range(workers):
        random = np.random.default_rng((arguments.seed, worker))
        phase = random.uniform() if arguments.phases else 0.0
        for direction, trace in (("up", up), ("down", down)):
            links[direction].append(trace.shifted(phase * trace.period).noisy(arguments.noise, random))
    return Setting(
        **links,
        compute=arguments.compute,
        steps=arguments.steps,
        rate=_RATES[arguments.task] if arguments.rate is None else arguments.rate,
        decays=arguments.decay,
        compression=arguments.compression,
        measured=not arguments.oracle,
        seed=arguments.seed,
        congestion=arguments.congestion,
        warmup=arguments.warmup,
    )


def compare(
    task,
    setting: Setting,
    policies: Sequence[str],
    time: float,
    density: float | None = None,
    progress: Callable[[Round], None] = lambda record: None,
) -> dict[str, list[Round]]:
    """Simulate a task with several policies.

    Args:
        task: The task.
        setting: What all policies have in common.
        policies: Names in ALL.
        time: Seconds of a step that adaptive policies aim at.
        density: The fixed density of "ef21"; None: the one with which it sends as many bytes as the first adaptive policy
            or, without one, as "kimad".
        progress: Called with each record of a policy that is compared.

    Returns:
        Label of each policy -> its records.
    """
    found = {}
    for name in (name for name in policies if name in ADAPTIVE):
        policy = ADAPTIVE[name](time)
        found[policy.label] = simulate(task, policy, setting, progress)
    if "ef21" in policies:
        if density is None:
            alike = next(iter(found.values()), None) or simulate(task, Kimad(time), setting)
            fixed = equal_bytes(task, setting, *_bytes_of(alike, setting))
        else:
            fixed = FixedDensity(density, density)
        found[FixedDensity.label] = simulate(task, fixed, setting, progress)
    if "gd" in policies:
        found[GradientDescent.label] = simulate(task, GradientDescent(), setting, progress)
    return found


def equal_bytes(task, setting: Setting, up: float, down: float) -> FixedDensity:
    """Find the fixed densities with which messages after a warm-up have about as many bytes as given, from a short pilot run.

    Args:
        task: The task.
        setting: What all policies have in common.
        up: Mean bytes of a worker's message to the server.
        down: Mean bytes of a message to a worker.

    Returns:
        The policy with these densities.
    """
    sizes = sum(Sender(make_compressor(setting.compression), task.layers).sizes)
    first = FixedDensity(uniform_density(sizes, up), uniform_density(sizes, down))
    steps = setting.warmup + max(1, (setting.steps - setting.warmup) // _PILOT)
    sent = _bytes_of(simulate(task, first, dataclasses.replace(setting, steps=steps, evaluations=1)), setting)
    return FixedDensity(min(1.0, first.up * up / sent[0]), min(1.0, first.down * down / sent[1]))


def _bytes_of(records: Sequence[Round], setting: Setting) -> tuple[float, float]:
    """Compute the mean bytes of messages, up and down, after the warm-up; of all of them where nothing comes after it."""
    counted = records[setting.warmup :] or records
    return tuple(float(np.mean([getattr(one, way) for one in counted])) for way in ("up", "down"))


def write_csv(path: Path, found: dict[tuple[int, str], list[Round]]) -> None:
    """Write every step as a row of a CSV file.

    Args:
        path: The file.
        found: (number of workers, label) -> records.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["workers", "policy", *(field.name for field in dataclasses.fields(Round))])
        for (workers, label), records in found.items():
            rows.writerows([workers, label, *dataclasses.astuple(record)] for record in records)


def table(found: dict[tuple[int, str], list[Round]]) -> str:
    """Format the means over all steps, and the final loss and best accuracy, as a table for the terminal.

    Args:
        found: (number of workers, label) -> records.

    Returns:
        The table, without a final line break.
    """
    rows = [("workers", "policy", "seconds a step", "bytes up", "bytes down", "squared error", "loss", "accuracy")]
    for (workers, label), records in found.items():
        mean = {name: np.mean([getattr(record, name) for record in records]) for name in ("seconds", "up", "down", "error")}
        best = max((record.accuracy for record in records if record.accuracy is not None), default=None)
        rows.append(
            (
                str(workers),
                label,
                f"{mean['seconds']:.4g}",
                f"{mean['up']:,.0f}",
                f"{mean['down']:,.0f}",
                f"{mean['error']:.4g}",
                f"{records[-1].loss:.4g}",
                "" if best is None else f"{best:.2%}",
            )
        )
    return text_table(rows, text_columns=(0, 1))

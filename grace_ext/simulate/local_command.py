"""The command `python -m grace_ext simulate-local`."""

import argparse
import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .._util.text_table import text_table
from .._util.units import count, seconds
from ..errors import ConfigError
from ..policy.advisor import measure_codec
from ..policy.cost_model import Codec, communicators_for
from ..rounds.presets import PRESETS
from . import traces
from .local_steps import LocalSetting, LocalTraining, Transfer, fastest

#: What each step exchanges without local steps.
EVERY_STEP = "every step"
_FLOAT32 = "dense/raw"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser.

    Args:
        parser: The parser of the command.
    """
    add = parser.add_argument
    add("--params", type=count, required=True, metavar="N", help="number of parameters of the model, such as 1G")
    add("--compute", type=seconds, required=True, metavar="T", help="time of a local step, such as 300ms")
    add("--workers", type=count, nargs="+", default=[8], metavar="M", help="numbers of workers (default: 8)")
    add("--total", type=count, default=1000, metavar="N", help="local steps of each worker in all (default: %(default)s)")
    add(
        "--methods",
        nargs="+",
        choices=[EVERY_STEP, *PRESETS],
        default=[EVERY_STEP, "diloco", "sparseloco", "muloco"],
        metavar="METHOD",
        help=f"what to compare: presets of local steps ({', '.join(PRESETS)}), and {EVERY_STEP!r}, which is float32 gradients in "
        "each step (default: that, diloco, sparseloco and muloco)",
    )
    add("--steps", type=count, metavar="H", help="local steps between two exchanges (default: the preset's)")
    add("--compression", metavar="SPEC", help="the spec of pseudo-gradients (default: the preset's)")
    add("--fragments", type=count, default=1, metavar="P", help="fragments of the model (default: %(default)s)")
    add("--delay", type=int, default=0, metavar="N", help="local steps that hide an exchange (default: %(default)s)")
    add(
        "--communicator",
        metavar="NAME",
        help="the communicator (default: allgather where the preset's mean needs what each worker sends, as sparseloco's does, else the "
        "one with which training ends first). Another one for such a preset stands for mean=WeightedMean()",
    )
    add(
        "--link",
        default="constant:100mbit",
        metavar="TRACE",
        help=f"bandwidth of a worker, in each direction: {traces.SPECS} (default: %(default)s)",
    )
    add("--latency", type=seconds, default=0.05, metavar="T", help="latency of a message (default: 50ms)")
    add("--noise", type=float, default=0.0, metavar="X", help="lognormal noise of each link (default: none)")
    add("--phases", action="store_true", help="let each worker's link begin at another point of its trace")
    add("--spread", type=float, default=0.0, metavar="X", help="lognormal noise of the time of a local step (default: none)")
    add("--seed", type=int, default=0, help="seed of all random numbers (default: %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="write every exchange to a CSV file")


def run(arguments: argparse.Namespace, codecs: Callable[[str], Codec] = measure_codec) -> int:
    """Run the command.

    Args:
        arguments: What `add_arguments` asks for.
        codecs: Gives the codec of a spec; by default it is measured here, on one core, with gradients of heavy tails.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: An argument is out of range, or an output folder does not exist.
    """
    if arguments.csv and not arguments.csv.parent.is_dir():
        raise ConfigError(f"{arguments.csv}: there is no folder {arguments.csv.parent}")
    known: dict[str, Codec] = {}
    found = {}
    for workers in arguments.workers:
        for method in arguments.methods:
            spec, setting = setting_of(method, workers, arguments)
            if spec not in known:
                known[spec] = codecs(spec)
            chosen = communicators_for(spec, workers)
            if arguments.communicator:
                chosen = [arguments.communicator]
            elif method in PRESETS and PRESETS[method].needs_each_rank:
                chosen = ["allgather"]
            found[workers, method, setting.steps, spec] = fastest(setting, known[spec], chosen)
    if arguments.csv:
        write_csv(arguments.csv, found)
    print(table(found))
    return 0


def setting_of(method: str, workers: int, arguments: argparse.Namespace) -> tuple[str, LocalSetting]:
    """Make the setting of a method.

    Args:
        method: Name of a preset, or EVERY_STEP.
        workers: Number of workers.
        arguments: What `add_arguments` asks for.

    Returns:
        The spec and the setting.

    Raises:
        ConfigError: An argument is out of range, or the preset needs `--steps`.
    """
    trace, links = traces.parse(arguments.link), []
    for worker in range(workers):
        random = np.random.default_rng((arguments.seed, worker))
        shifted = trace.shifted(random.uniform() * trace.period) if arguments.phases else trace
        links.append(shifted.noisy(arguments.noise, random))
    common = {
        "params": arguments.params,
        "links": links,
        "compute": arguments.compute,
        "total": arguments.total,
        "latency": arguments.latency,
        "spread": arguments.spread,
        "seed": arguments.seed,
    }
    if method == EVERY_STEP:
        return _FLOAT32, LocalSetting(**common, steps=1, headers=False)
    preset = PRESETS[method]
    steps = arguments.steps or preset.steps
    if steps is None:
        raise ConfigError(f"preset {method!r} has no usual number of steps: give --steps")
    setting = LocalSetting(**common, steps=steps, fragments=arguments.fragments, delay=arguments.delay)
    return arguments.compression or preset.compression, setting


Found = dict[tuple[int, str, int, str], tuple[str, LocalTraining]]


def write_csv(path: Path, found: Found) -> None:
    """Write every exchange as a row of a CSV file.

    Args:
        path: The file.
        found: (number of workers, method, steps, spec) -> the communicator, and what came of it.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["workers", "method", "communicator", *(field.name for field in dataclasses.fields(Transfer))])
        for (workers, method, _, _), (communicator, training) in found.items():
            rows.writerows([workers, method, communicator, *dataclasses.astuple(one)] for one in training.transfers)


def table(found: Found) -> str:
    """Format what came of simulations as a table for the terminal.

    Args:
        found: (number of workers, method, steps, spec) -> the communicator, and what came of it.

    Returns:
        The table, without a final line break.
    """
    rows = [("workers", "method", "spec", "steps", "communicator", "s an exchange", "GB sent", "hours", "computing")]
    for (workers, method, steps, spec), (communicator, training) in found.items():
        rows.append(
            (
                str(workers),
                method,
                spec,
                str(steps),
                communicator,
                f"{np.mean([one.seconds for one in training.transfers]):,.1f}",
                f"{training.sent / 1e9:,.1f}",
                f"{training.seconds / 3600:,.1f}",
                f"{training.efficiency:.1%}",
            )
        )
    return text_table(rows, text_columns=(1, 2, 4))

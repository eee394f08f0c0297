"""The command `python -m grace_ext simulate`."""

import argparse
import csv
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .._util.units import count, seconds
from ..errors import ConfigError
from ..pipeline.compressor import make_compressor
from ..policy.kimad import uniform
from . import traces
from .policies import EF21, Kimad, KimadPlus, Sender
from .run import Round, Setting, simulate
from .tasks import FashionMnist, Quadratic

#: The adaptive policies by name; "ef21" has the density with which it sends as many bytes as the first of them.
ADAPTIVE = {"kimad": Kimad, "kimad+": KimadPlus}
POLICIES = ("ef21", *ADAPTIVE)
_PILOT = 5  # of a run's steps, one of so many tells what a density's messages take
_RATES = {"quadratic": 0.5, "cnn": 0.05}  # of learning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=_RATES, default="quadratic", help="equation (10) of Kimad, or a network on Fashion-MNIST")
    add("--data", metavar="DIR", help="of Fashion-MNIST, for cnn")
    add("--workers", type=count, nargs="+", default=[4], metavar="M", help="one simulation for each (default: 4)")
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="(default: all)")
    add(
        "--density",
        type=float,
        metavar="X",
        help="of ef21 (default: that with which it sends as many bytes as the first adaptive policy)",
    )
    add("--time", type=seconds, default=0.1, metavar="T", help="of a step, that adaptive policies aim at (default: 100ms)")
    add("--compute", type=seconds, default=0.05, metavar="T", help="of a worker's gradient (default: 50ms)")
    add("--steps", type=count, default=100, metavar="N", help="(default: %(default)s)")
    add(
        "--up",
        default="sinusoid:30mbit:330mbit:2s",
        metavar="TRACE",
        help=f"{traces.SPECS} (default: %(default)s); the file has rows of seconds and Mbit/s",
    )
    add("--down", metavar="TRACE", help="(default: as --up)")
    add(
        "--noise",
        type=float,
        default=0.0,
        metavar="X",
        help="of each link: the standard deviation of a factor's logarithm (default: none)",
    )
    add("--phases", action="store_true", help="each worker's traces begin at another point")
    add("--oracle", action="store_true", help="policies know the bandwidth, and need not measure it")
    add("--compression", default=Setting.compression, metavar="SPEC", help="whose density is chosen (default: %(default)s)")
    add("--rate", type=float, metavar="X", help=f"of learning (default: {_RATES})")
    add("--decay", action="store_true", help="the rate falls to 0 on a straight line")
    add("--dimension", type=count, default=3000, metavar="N", help="of the quadratic (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--csv", type=Path, metavar="FILE", help="write every step")
    add("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")


def run(arguments, progress: Callable[[int, int, str], None]) -> int:
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
    """Counts the rounds of all policies; says so at each hundredth of them."""

    def __init__(self, progress, total: int, workers: int):
        self._progress, self._total, self._workers, self._done = progress, total, workers, 0

    def __call__(self, record: Round) -> None:
        self._done += 1
        if self._done * 100 // self._total > (self._done - 1) * 100 // self._total or self._done == self._total:
            self._progress(self._done, self._total, f"steps, {self._workers} workers: loss {record.loss:.4g}")


def setting_of(workers: int, arguments) -> Setting:
    """Each worker's links, of its own noise and phase; those of the first workers are the same for any number of them."""
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
    )


def compare(
    task,
    setting: Setting,
    policies: Sequence[str],
    time: float,
    density: float | None = None,
    progress: Callable[[Round], None] = lambda record: None,
) -> dict[str, list[Round]]:
    """Records by label. policies: of POLICIES; a fixed density that is not given is the one with which as many bytes go as
    with the first adaptive policy, or as with kimad where there is none. progress: of what is compared."""
    found = {}
    for name in (name for name in policies if name in ADAPTIVE):
        policy = ADAPTIVE[name](time)
        found[policy.label] = simulate(task, policy, setting, progress)
    if "ef21" in policies:
        if density is None:
            alike = next(iter(found.values()), None) or simulate(task, Kimad(time), setting)
            fixed = equal_bytes(task, setting, *_bytes_of(alike))
        else:
            fixed = EF21(density, density)
        found[EF21.label] = simulate(task, fixed, setting, progress)
    return found


def equal_bytes(task, setting: Setting, up: float, down: float) -> EF21:
    """The fixed densities with which messages have about so many bytes, from the first steps with others."""
    sizes = sum(Sender(make_compressor(setting.compression), task.layers).sizes)
    first = EF21(uniform(sizes, up), uniform(sizes, down))
    pilot = simulate(task, first, dataclasses.replace(setting, steps=max(1, setting.steps // _PILOT), evaluations=1))
    sent = _bytes_of(pilot)
    return EF21(min(1.0, first.up * up / sent[0]), min(1.0, first.down * down / sent[1]))


def _bytes_of(records: Sequence[Round]) -> tuple[float, float]:
    """Means, up and down."""
    return tuple(float(np.mean([getattr(one, way) for one in records])) for way in ("up", "down"))


def write_csv(path: Path, found: dict[tuple[int, str], list[Round]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["workers", "policy", *(field.name for field in dataclasses.fields(Round))])
        for (workers, label), records in found.items():
            rows.writerows([workers, label, *dataclasses.astuple(record)] for record in records)


def table(found: dict[tuple[int, str], list[Round]]) -> str:
    """Means of all steps, and how it ended."""
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in cells)

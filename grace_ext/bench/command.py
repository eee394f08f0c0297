"""The command `python -m grace_ext bench`."""

import argparse
import importlib.util
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from .._util.units import count
from ..catalogue import catalogue
from ..errors import ConfigError
from . import report
from .inputs import SYNTHETIC
from .run import SPECS, measure, plan

_PLANNED = ("input", "size", "density", "spec", "ranks", "repetitions", "peers", "quick", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser.

    Args:
        parser: The parser of the command.
    """
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        default=["heavy"],
        metavar="INPUT",
        help=f"{', '.join(SYNTHETIC)}, or a .npy or .npz file of saved gradients (default: heavy)",
    )
    add(
        "--size",
        type=count,
        nargs="+",
        metavar="N",
        help="number of elements of a synthetic gradient, such as 1M (default: 25.6M)",
    )
    add(
        "--density",
        type=float,
        nargs="+",
        metavar="X",
        help="shares of the elements that are selected (default: 0.001 0.01 0.1)",
    )
    add("--spec", nargs="+", help=f"whole pipelines to measure (default: {' '.join(SPECS)} and all presets)")
    add("--ranks", type=count, default=8, metavar="N", help="number of containers to add up (default: %(default)s)")
    add("--repetitions", type=count, metavar="N", help="repetitions of each measurement (default: 9)")
    add("--seed", type=int, default=0, help="seed of the synthetic gradient (default: %(default)s)")
    add("--quick", action="store_true", help="use a small size and few repetitions, unless they are given")
    add("--no-peers", dest="peers", action="store_false", help="leave out other libraries (torch.topk, pyroaring, ...)")
    add("--json", type=Path, metavar="FILE", help="write all figures with the date, the machine and the versions")
    add("--plot", type=Path, metavar="FILE", help="plot the figures (needs matplotlib)")
    add("--markdown", type=Path, metavar="FILE", help="write the tables as a Markdown document")


def run(arguments: argparse.Namespace, progress: Callable[[int, int, str], None]) -> int:
    """Run the command.

    Args:
        arguments: What `add_arguments` asks for, and `argv`, the arguments as they were given.
        progress: Called with (done, total, what) after each part.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: An argument is out of range, an output folder does not exist, or matplotlib is missing.
    """
    planned = plan(**{key: getattr(arguments, key) for key in _PLANNED})
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'grace_ext[plots]'")
    for path in (arguments.json, arguments.plot, arguments.markdown):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
    results = measure(planned, progress)
    results["command"] = "python -m grace_ext " + shlex.join(arguments.argv)
    results["catalogue"] = catalogue()
    print(report.text(results), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2, default=str) + "\n")
    if arguments.plot:
        from .plot import draw

        draw(results, arguments.plot)
    if arguments.markdown:
        image = os.path.relpath(arguments.plot, arguments.markdown.parent) if arguments.plot else None
        arguments.markdown.write_text(report.markdown(results, image))
    return 0

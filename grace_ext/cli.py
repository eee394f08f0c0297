"""The command line: `python -m grace_ext warmup | codecs | inspect | bench | advise | simulate | simulate-local |
timeline | device-check`.

Results go to stdout, progress and errors to stderr. The exit status is 0, 1 for a file that is not what it should be, 2 for
arguments that cannot work, or 130 after an interrupt.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable

import numpy as np

from . import __version__, kernels, registry
from ._util.cores import available_cores
from ._util.units import bits_per_second, count, seconds
from .bench import command as bench_command
from .catalogue import catalogue
from .errors import ConfigError, ContainerError, GraceError
from .inspection import MOST_ELEMENTS, check_sections, describe
from .observe import merge_timelines
from .pipeline.container import parse
from .pipeline.presets import PRESETS
from .policy import advisor, projections
from .simulate import command as simulate_command
from .simulate import local_command


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; None: those of the process.

    Returns:
        The exit status.
    """
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    arguments.argv = argv
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()  # here, so that a closed pipe is noticed before the interpreter ends
        return status
    except ConfigError as error:
        return _fail(error, 2)
    except BrokenPipeError:  # the reader of stdout has seen enough (`... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error, 1)
    except (GraceError, MemoryError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: object, status: int) -> int:
    print(f"grace_ext: {message}", file=sys.stderr)
    return status


class Progress:
    """Prints progress to stderr: one line per call of (done, total, what), rewritten in place on a terminal."""

    def __init__(self) -> None:
        self.in_place = sys.stderr.isatty()

    def __call__(self, done: int, total: int, what: str) -> None:
        text = f"[{done}/{total}] {what}"
        if self.in_place:
            print(f"\r\x1b[K{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _warmup(arguments: argparse.Namespace) -> int:
    """Compile every kernel now, so that no training step waits for it."""
    started = time.perf_counter()
    compiled = kernels.warmup(Progress(), arguments.jobs)
    folder = kernels.cache_folder()
    place = f"cached in {folder}" if folder else "not cached (no cache folder is writable: set GRACE_EXT_CACHE to one)"
    print(f"{compiled} kernels are ready after {time.perf_counter() - started:.1f} s, {place}")
    return 0


def _codecs(arguments: argparse.Namespace) -> int:
    """List every registered stage with its options, their defaults and its source, and the presets."""
    found = catalogue()
    if arguments.json:
        print(json.dumps(found, indent=2, default=str))
        return 0
    for kind in registry.KINDS:
        members = [part for part in found if part["kind"] == kind]
        if members:
            print(f"{kind}\n{'=' * len(kind)}")
        for part in members:
            options = "".join(f":{key}={value}" for key, value in part["options"].items())
            number = [] if part["id"] is None else [f"container id {part['id']}"]
            properties = ", ".join(number + part["traits"])
            print(f"\n  {part['name']}{options}" + (f"  ({properties})" if properties else ""))
            for text in (part["summary"], part["notes"], *part["papers"]):
                if text:
                    print(textwrap.fill(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
        if members:
            print()
    print("preset\n======\n")
    for name, spec in PRESETS.items():
        print(f"  {name:<18} {spec}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    """Show the containers in a file; the status is 1 if one of them, or what follows them, is malformed."""
    data = np.fromfile(arguments.file, np.uint8)
    if data.size == 0:
        return _fail(f"{arguments.file} is empty", 1)
    at = number = status = 0
    while at < data.size:
        where = f"container {number} at byte {at:,}"
        try:
            parsed = parse(data[at:], prefix=True)
        except ContainerError as error:  # where the next one would begin is not known
            sys.stdout.flush()
            return _fail(f"{arguments.file}: {where}: {error}", 1)
        print(f"{where}: {parsed.nbytes:,} bytes, checksum ok")
        for label, text in describe(parsed):
            print(f"  {label:<9}{text}", flush=True)
        try:
            check_sections(parsed, arguments.elements)
        except ContainerError as error:
            status = _fail(f"{arguments.file}: {where}: {error}", 1)
        at += parsed.nbytes
        number += 1
    return status


def _bench(arguments: argparse.Namespace) -> int:
    """Measure every stage and whole pipelines, in multiples of one memcpy of the gradient."""
    return bench_command.run(arguments, Progress())


def _advise(arguments: argparse.Namespace) -> int:
    """Predict the step time with and without compression, from this machine's codec speeds, and recommend what to use."""
    keys = ("params", "step_time", "bandwidth", "workers", "per_host", "latency", "overlap", "strict", "optimizer")
    given = {key: getattr(arguments, key) for key in keys} | {"codecs": advisor.measure_codecs()}
    print(advisor.report(advisor.advise(**given)))
    if arguments.efficiency:
        counts = [count * arguments.per_host for count in projections.WORKERS if count * arguments.per_host <= 1024]
        print("\n" + projections.table(advisor.efficiencies(**{**given, "workers": counts})))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    """Train in virtual time over links of varying bandwidth, with a fixed density, Kimad and Kimad+."""
    return simulate_command.run(arguments, Progress())


def _simulate_local(arguments: argparse.Namespace) -> int:
    """Predict how long a training with local steps takes, over links of varying bandwidth, from this machine's codecs."""
    return local_command.run(arguments)


def _timeline(arguments: argparse.Namespace) -> int:
    """Merge the phases of compression into Horovod's timeline."""
    phases = merge_timelines(arguments.horovod, arguments.ours, arguments.output)
    print(f"{phases} phases are now in {arguments.output}; open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _device_check(arguments: argparse.Namespace) -> int:
    """Check the kernels for GPUs on this machine, or in Triton's interpreter where there is none, and write what they did."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"device-check needs {' and '.join(missing)}: pip install 'grace_ext[torch,triton]'")
    # By its name, because it is a framework's: the core does without.
    return importlib.import_module("grace_ext.adapters._torch.device_check").run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grace_ext",
        description="Gradient compression: list the codecs, inspect containers, measure, advise and simulate.",
    )
    parser.add_argument("--version", action="version", version=f"grace_ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        added.set_defaults(run=run)
        return added

    add("warmup", _warmup).add_argument(
        "--jobs",
        type=count,
        default=max(1, int(available_cores())),
        metavar="N",
        help="number of processes that compile (default: %(default)s, the cores available to this process)",
    )
    add("codecs", _codecs).add_argument("--json", action="store_true", help="print machine-readable JSON")
    added = add("inspect", _inspect)
    added.add_argument("file", help="one container, or several one after the other")
    added.add_argument(
        "--elements",
        type=count,
        default=MOST_ELEMENTS,
        metavar="N",
        help="the most elements of a container that are decoded, 8 bytes each (default: %(default)s)",
    )
    bench_command.add_arguments(add("bench", _bench))
    _add_advise_arguments(add("advise", _advise))
    simulate_command.add_arguments(add("simulate", _simulate))
    local_command.add_arguments(add("simulate-local", _simulate_local))
    added = add("timeline", _timeline)
    added.add_argument("horovod", help="the timeline that Horovod wrote (HOROVOD_TIMELINE or hvd.start_timeline)")
    added.add_argument("ours", help="the timeline that grace_ext.observe.Timeline wrote in the same run")
    added.add_argument("-o", "--output", required=True, metavar="FILE", help="the merged timeline; may be one of the two")
    added = add("device-check", _device_check)
    added.add_argument(
        "-o",
        "--output",
        default="grace_ext-device-check.json",
        metavar="FILE",
        help="what is written (default: %(default)s)",
    )
    return parser


def _add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--params", type=count, required=True, metavar="N", help="number of parameters of the model, such as 25.6M")
    add("--step-time", type=seconds, required=True, metavar="T", help="time of a step without any exchange, such as 120ms")
    add("--bandwidth", type=bits_per_second, required=True, metavar="RATE", help="bandwidth of a host's link, such as 1gbit")
    add("--workers", type=count, required=True, metavar="N", help="number of workers in all")
    add("--per-host", type=count, default=1, metavar="N", help="workers that share a host's link (default: %(default)s)")
    add("--latency", type=seconds, default=1e-4, metavar="T", help="latency of a message (default: 100us)")
    add(
        "--overlap",
        type=float,
        default=0.5,
        metavar="X",
        help="share of the step that can overlap with the exchange (default: %(default)s)",
    )
    add("--efficiency", action="store_true", help="add a table of the efficiency E(P) with 2 to 1,024 workers")
    add("--strict", action="store_true", help="recommend only methods that do no more than round every element")
    add(
        "--optimizer",
        choices=advisor.OPTIMIZERS,
        help="the optimizer family: sgd is SGD with momentum, adam includes AdamW and similar; only methods that were "
        "shown to keep accuracy with it are recommended (default: those that keep it with all of them)",
    )

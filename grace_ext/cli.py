"""The command line: `python -m grace_ext warmup | codecs | inspect | bench | advise | simulate | timeline`.

Results go to stdout, progress and errors to stderr. Exit status: 0, 1 for a file that is not what it should be, 2
for arguments that cannot work.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

from . import __version__, bench, kernels, registry
from ._util.units import bits_per_second, count, seconds
from .bench import report
from .errors import ConfigError, ContainerError, GraceError
from .observe import merge_timelines
from .pipeline.container import Container, parse
from .pipeline.decoder import unpack
from .pipeline.presets import PRESETS
from .policy import advisor
from .simulate import command as simulation

_YEAR = re.compile(r"\b(19|20)\d\d\b")
#: What a class may say about itself: attribute -> text for a true value, text for a false one.
_TRAITS = {
    "lossless": ("lossless", "lossy"),
    "reducible_dtype": ("summable as {}", None),
    "shared": ("the same positions on all ranks", None),
    "stateful": ("keeps state", "keeps no state"),
    "needs_reducible": ("needs summable values", None),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status. argv: without the program's name."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    arguments.argv = argv
    try:
        return arguments.run(arguments)
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


def _fail(message, status: int) -> int:
    print(f"grace_ext: {message}", file=sys.stderr)
    return status


class Progress:
    """Call it with (done, total, what): a line each on stderr, rewritten in place if that is a terminal."""

    def __init__(self):
        self.in_place = sys.stderr.isatty()

    def __call__(self, done: int, total: int, what: str) -> None:
        text = f"[{done}/{total}] {what}"
        if self.in_place:
            print(f"\r\x1b[K{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def warmup(arguments) -> int:
    """Compile every kernel now, so that no training step waits for it."""
    started = time.perf_counter()
    count = kernels.warmup(Progress(), arguments.jobs)
    folder = kernels.cache_folder()
    place = folder or "nowhere (no writable cache folder: set GRACE_EXT_CACHE to one)"
    print(f"{count} kernels are ready after {time.perf_counter() - started:.1f} s; kept in: {place}")
    return 0


def codecs(arguments) -> int:
    """List every registered part, its options with their defaults and where it comes from, and the presets."""
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


def catalogue() -> list[dict]:
    """All that is registered, from the classes themselves.

    summary: the first paragraph of the module's docstring; notes: the first of the class's; papers: the module's
    other paragraphs that name a year.
    """
    found = []
    for kind in registry.KINDS:
        for name in registry.names(kind):
            cls = registry.lookup(kind, name)
            summary, *others = _paragraphs(sys.modules[cls.__module__].__doc__) or [""]
            found.append(
                {
                    "kind": kind,
                    "name": name,
                    "id": cls.id,
                    "options": {key: parameter.default for key, parameter in registry.parameters(cls).items()},
                    "traits": _traits(cls),
                    "summary": summary,
                    "notes": (_paragraphs(cls.__doc__) or [""])[0],
                    "papers": [text for text in others if _YEAR.search(text)],
                }
            )
    return found


def _traits(cls: type) -> list[str]:
    texts = []
    for attribute, (if_true, if_false) in _TRAITS.items():
        if hasattr(cls, attribute):
            value = getattr(cls, attribute)
            texts.append(if_true.format(value) if value else if_false)
    return [text for text in texts if text]


def _paragraphs(docstring: str | None) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (docstring or "").split("\n\n") if paragraph.strip()]


def inspect(arguments) -> int:
    """Show the containers in a file; status 1 if one of them, or what follows them, is malformed."""
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
        for label, text in _describe(parsed):
            print(f"  {label:<9}{text}", flush=True)
        try:
            _check_sections(parsed)
        except ContainerError as error:
            status = _fail(f"{arguments.file}: {where}: {error}", 1)
        at += parsed.nbytes
        number += 1
    return status


def _describe(parsed: Container):
    yield "dtype", parsed.dtype
    if parsed.shape is not None:
        yield "shape", " x ".join(map(str, parsed.shape)) or "scalar"
    yield "d", f"{parsed.d:,}"
    if parsed.transform:
        transform = registry.by_id("transform", parsed.transform[0])
        yield "domain", f"{parsed.domain:,} coefficients of {transform.name} (id {transform.id})"
    if parsed.non_finite:
        yield "content", "none: the sender's gradient held a NaN or an Inf"
        yield "overhead", f"{parsed.nbytes} bytes"
        return
    overhead = parsed.nbytes - parsed.value_section.size - parsed.index_section.size
    yield "k", f"{parsed.k:,}" + (f" (density {parsed.k / parsed.domain:.4%})" if parsed.d else "")
    if parsed.index_id:
        text = _section("index", parsed.index_id, parsed.index_section, parsed.k)
        if parsed.k:
            text += f"; uniformly random positions need {bench.index_bound(parsed.domain, parsed.k):.2f}"
        yield "index", text
    else:
        yield "index", "none: all elements are here"
    yield "value", _section("value", parsed.value_id, parsed.value_section, parsed.k)
    if parsed.order_section is not None:
        overhead -= parsed.order_section.size
        yield "order", f"{parsed.order_section.size:,} bytes{_bits(parsed.order_section, parsed.k, 'value')}"
    yield "overhead", f"{overhead} bytes"
    yield "ratio", f"{4 * parsed.d / parsed.nbytes:.2f} : 1 against float32, all included"


def _section(kind: str, id: int, section: np.ndarray, k: int) -> str:
    codec = registry.by_id(kind, id)
    name = codec.name if codec else "unknown"
    return f"{name} (id {id}), {section.size:,} bytes{_bits(section, k, kind)}"


def _bits(section: np.ndarray, k: int, what: str) -> str:
    return f", {8 * section.size / k:.2f} bits per {what}" if k else ""


def _check_sections(parsed: Container) -> None:
    """Raise ContainerError if the sections do not decode."""
    if not parsed.non_finite:
        support = np.empty(parsed.k if parsed.index_id else 0, np.uint32)
        unpack(parsed, support, np.empty(parsed.k, np.float32))


def run_bench(arguments) -> int:
    """Measure every stage and the whole road against one memcpy of the gradient."""
    plan = bench.plan(
        **{
            key: getattr(arguments, key)
            for key in ("input", "size", "density", "spec", "ranks", "repetitions", "peers", "quick", "seed")
        }
    )
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'grace_ext[plots]'")
    for path in (arguments.json, arguments.plot, arguments.markdown):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
    results = bench.measure(plan, Progress())
    results["command"] = "python -m grace_ext " + shlex.join(arguments.argv)
    results["catalogue"] = catalogue()
    print(report.text(results), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2, default=str) + "\n")
    if arguments.plot:
        from .bench import plot

        plot.draw(results, arguments.plot)
    if arguments.markdown:
        image = os.path.relpath(arguments.plot, arguments.markdown.parent) if arguments.plot else None
        arguments.markdown.write_text(report.markdown(results, image))
    return 0


def advise(arguments) -> int:
    """Predict the step with and without compression, with this machine's codecs; say what to use, if anything."""
    keys = ("params", "step_time", "bandwidth", "workers", "per_host", "latency", "overlap", "strict", "optimizer")
    print(advisor.report(advisor.advise(**{key: getattr(arguments, key) for key in keys})))
    return 0


def run_simulation(arguments) -> int:
    """Train in virtual time over links whose bandwidth changes, with a fixed density, Kimad and Kimad+."""
    return simulation.run(arguments, Progress())


def timeline(arguments) -> int:
    """Put the phases of compression into Horovod's timeline."""
    count = merge_timelines(arguments.horovod, arguments.ours, arguments.output)
    print(f"{count} phases are now in {arguments.output}; open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grace_ext", description="Gradient compression: see what is there, look into containers, measure."
    )
    parser.add_argument("--version", action="version", version=f"grace_ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name, run):
        added = commands.add_parser(name, help=run.__doc__.split("\n")[0], description=run.__doc__)
        added.set_defaults(run=run)
        return added

    add("warmup", warmup).add_argument(
        "--jobs",
        type=count,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that compile (default: %(default)s, the cores of this process)",
    )
    add("codecs", codecs).add_argument("--json", action="store_true", help="machine-readable")
    add("inspect", inspect).add_argument("file", help="one container, or several one after the other")
    _add_bench_arguments(add("bench", run_bench))
    _add_advise_arguments(add("advise", advise))
    simulation.add_arguments(add("simulate", run_simulation))
    added = add("timeline", timeline)
    added.add_argument("horovod", help="what Horovod wrote: HOROVOD_TIMELINE, or hvd.start_timeline")
    added.add_argument("ours", help="what grace_ext.observe.Timeline wrote in the same run")
    added.add_argument("-o", "--output", required=True, metavar="FILE", help="may be one of the two")
    return parser


def _add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--params", type=count, required=True, metavar="N", help="of the model, such as 25.6M")
    add("--step-time", type=seconds, required=True, metavar="T", help="of a step without any exchange, such as 120ms")
    add("--bandwidth", type=bits_per_second, required=True, metavar="RATE", help="of a host's link, such as 1gbit")
    add("--workers", type=count, required=True, metavar="N", help="in all")
    add("--per-host", type=count, default=1, metavar="N", help="workers that share a host's link (default: %(default)s)")
    add("--latency", type=seconds, default=1e-4, metavar="T", help="of a message (default: 100us)")
    add(
        "--overlap",
        type=float,
        default=0.5,
        metavar="X",
        help="share of the step that the exchange can hide behind (default: %(default)s)",
    )
    add("--strict", action="store_true", help="recommend only what does no more than round every element")
    add(
        "--optimizer",
        choices=advisor.OPTIMIZERS,
        help="sgd: with momentum; adam: AdamW and its kin, too. Only what was "
        "shown to keep accuracy with it is recommended (default: with all of them)",
    )


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        default=["heavy"],
        metavar="INPUT",
        help=f"{', '.join(bench.SYNTHETIC)}, or a .npy or .npz file of saved gradients (default: heavy)",
    )
    add("--size", type=count, nargs="+", metavar="N", help="elements of a synthetic gradient, such as 1M (default: 25.6M)")
    add(
        "--density",
        type=float,
        nargs="+",
        metavar="X",
        help="shares of the elements that are selected (default: 0.001 0.01 0.1)",
    )
    add("--spec", nargs="+", help=f"whole roads (default: {' '.join(bench.SPECS)} and all presets)")
    add("--ranks", type=count, default=8, metavar="N", help="containers to add up (default: %(default)s)")
    add("--repetitions", type=count, metavar="N", help="of each measurement (default: 9)")
    add("--seed", type=int, default=0, help="of the synthetic gradient (default: %(default)s)")
    add("--quick", action="store_true", help="small size and few repetitions, unless they are given")
    add("--no-peers", dest="peers", action="store_false", help="leave other libraries out (torch.topk, pyroaring, ...)")
    add("--json", type=Path, metavar="FILE", help="write all figures, with date, machine and versions")
    add("--plot", type=Path, metavar="FILE", help="draw the figures (needs matplotlib)")
    add("--markdown", type=Path, metavar="FILE", help="write the tables as a document")

"""Large models: steps, memory, first step, build, save and load, each in a job of its own; writes docs/large.md.

    python benchmarks/large.py run --ranks 2
    python benchmarks/large.py page

Each step is that of a few tokens, so that most of it is the exchange. A run whose result is in benchmarks/results/large is not
repeated. About half an hour on two idle cores.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys

from _lib import EXAMPLES, ROOT, SHARED_CORES, RunFailed, as_markdown, finish
from _page import days, keep, part_of, read_part

from grace_ext.policy.defaults import ADAM

sys.path.insert(0, EXAMPLES)
from _launch import horovodrun, torchrun  # noqa: E402

RESULTS = os.path.join(ROOT, "benchmarks", "results", "large")
PAGE = os.path.join(ROOT, "docs", "large.md")
WORKER = os.path.join(ROOT, "benchmarks", "_large_worker.py")
SPARSE = {"compression": "topk:0.01/rice/qsgd:7"}
RELEASED = {"release_gradients": True, "bucket_bytes": 2**21}
BASE = "horovod-fp32"
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


@dataclasses.dataclass
class Way:
    """A row of the tables: what the page calls it, "horovod" or "ddp", and what is given to the library or to grace_ext."""

    label: str
    launcher: str
    library: str
    arguments: dict
    environment: dict = dataclasses.field(default_factory=dict)


WAYS = {
    BASE: Way("Horovod float32", "horovod", "horovod", {"compression": "none"}),
    "horovod-huge": Way("Horovod float32, huge pages", "horovod", "horovod", {"compression": "none"}, HUGE_PAGES),
    "horovod-fp16": Way("Horovod fp16", "horovod", "horovod", {"compression": "fp16"}),
    "residual": Way("grace_ext, residual", "horovod", "grace_ext", {**SPARSE, "memory": "residual"}),
    "released": Way(
        "… gradients released, buckets of 2 MiB", "horovod", "grace_ext", {**SPARSE, "memory": "residual", **RELEASED}
    ),
    "residual-8": Way("… in 8 bits", "horovod", "grace_ext", {**SPARSE, "memory": "residual:bits=8", **RELEASED}),
    "residual-huge": Way(
        "grace_ext, residual, huge pages", "horovod", "grace_ext", {**SPARSE, "memory": "residual"}, HUGE_PAGES
    ),
    "horovod-adamw": Way("Horovod float32, AdamW", "horovod", "horovod", {"compression": "none"}),
    "adam": Way(
        "grace_ext, memory adam, AdamW", "horovod", "grace_ext", {"compression": ADAM.compression, "memory": ADAM.memory}
    ),
    "powersgd": Way("grace_ext, PowerSGD rank 4", "horovod", "grace_ext", {"compression": "powersgd:4"}),
    "ddp-fp32": Way("DDP float32", "ddp", "torch", {}),
    "ddp-fp16": Way("DDP fp16", "ddp", "torch", {"hook": "fp16"}),
    "ddp-residual": Way("DDP with grace_ext, residual", "ddp", "grace_ext", {**SPARSE, "memory": "residual"}),
}


@dataclasses.dataclass
class Model:
    """steps: after the first one. ways: those that fit into 24 GiB on two ranks; None for all."""

    label: str
    steps: int
    ways: tuple[str, ...] | None = None


MODELS = {
    "gpt2": Model("GPT-2 small: 148 tensors, 124 M parameters", 8),
    "many": Model("10,000 tensors of 64 x 64, 41 M parameters", 6),
    "billion": Model("GPT-2 of 1.1 billion parameters in bfloat16, 292 tensors", 3, (BASE, "horovod-fp16", "residual-8")),
}


def path_of(model: str, way: str, ranks: int, folder: str) -> str:
    return os.path.join(folder, f"{model}_{way}_{ranks}.json")


def run(model: str, way_name: str, args) -> None:
    """Measure once, and keep the result. Raises RunFailed."""
    way, out = WAYS[way_name], path_of(model, way_name, args.ranks, args.results)
    options = {
        "model": model,
        "launcher": way.launcher,
        "library": way.library,
        "arguments": way.arguments,
        "optimizer": "AdamW" if "AdamW" in way.label else "SGD",
        "steps": MODELS[model].steps,
        "out": part_of(out),
    }
    command = (horovodrun if way.launcher == "horovod" else torchrun)(args.ranks)
    finish(
        f"{model}, {way.label}", [*command, WORKER, json.dumps(options)], args.timeout, {**SHARED_CORES, **way.environment}
    )
    found = read_part(out)
    del found["options"]["out"]
    keep(found, out)


def table(model: str, ranks: int, folder: str) -> list[str]:
    """The table of a model as lines of Markdown; [] without results."""
    found = {}
    for name in WAYS:
        if os.path.exists(path_of(model, name, ranks, folder)):
            with open(path_of(model, name, ranks, folder)) as file:
                found[name] = json.load(file)
    if BASE not in found:
        return []
    rows = [
        [
            "",
            "step, ms",
            "after backward",
            "in memcpys",
            "memory, GB",
            "more copies",
            "build, s",
            "first step, s",
            "save, s",
            "load, s",
        ]
    ]
    base = found[BASE]
    for name, one in found.items():
        after = statistics.median(one["after_backward"])
        rows.append(
            [
                WAYS[name].label,
                f"{1e3 * statistics.median(one['steps']):.0f}",
                f"{1e3 * after:.0f}",
                f"{after / one['memcpy']:.1f}",
                f"{one['peak'] / 1e9:.2f}",
                "" if name == BASE else f"{(one['peak'] - base['peak']) / (4 * one['parameters']):+.2f}",
                *(f"{one[key]:.2f}" for key in ("build", "first", "save", "load")),
            ]
        )
    memcpy = f"One memcpy took {1e3 * base['memcpy']:.0f} ms beside Horovod float32."
    return [f"## {MODELS[model].label}, {ranks} ranks", "", as_markdown(rows), "", memcpy, ""]


def write_page(folder: str) -> None:
    """Write docs/large.md from all results."""
    results = [name for name in sorted(os.listdir(folder)) if name.endswith(".json")]
    ranks = sorted({int(name[: -len(".json")].rpartition("_")[2]) for name in results})
    runs = []
    for name in results:
        with open(os.path.join(folder, name)) as file:
            runs.append(json.load(file))
    dates, machines = (sorted({one[what] for one in runs}) for what in ("date", "machine"))
    lines = [
        "# Large models",
        "",
        "Written by `benchmarks/large.py page`; do not edit. A step is that of a GPT-2 with 32 random tokens a rank, and of tensors",
        "whose gradients are noise, so that most of it is the exchange. The optimizer is SGD without momentum where the row does not",
        "name AdamW. *After backward* is the time from the last gradient to the end of the step, the optimizer's own included; a memcpy is",
        "one of all gradients in float32. Memory is the largest resident set of rank 0 in all steps, the first included, and *more copies*",
        "is what it exceeds Horovod float32's by, in float32 copies of all gradients; two of those are AdamW's moments in its rows. Build",
        "is the wrapping of the optimizer or the model; save and load are those of the wrapper's and the optimizer's state, in memory. All",
        "ranks share the machine. *Huge pages*: `THP_MEM_ALLOC_ENABLE=1` in the environment, by which PyTorch asks Linux for huge",
        "pages; what grace_ext keeps has them always. PyTorch's PowerSGD hook is not here: over Gloo, the collectives of its buckets met",
        "in different orders on the ranks, and the job ended with an error.",
        "",
    ]
    for model in MODELS:
        for number in ranks:
            lines += table(model, number, folder)
    lines.append(
        f"Measured {days(dates)} on {'; '.join(machines)}; by `python benchmarks/large.py run --ranks N` and "
        f"`python benchmarks/large.py page`. Each result, with its commit, is in `benchmarks/results/large`."
    )
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="measure, and keep the results")
    runs.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    runs.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    runs.add_argument("--ranks", type=int, default=2)
    runs.add_argument("--timeout", type=float, default=1200, help="seconds of a job")
    runs.add_argument("--again", action="store_true", help="also where there is a result")
    for command in (runs, commands.add_parser("page", help="write docs/large.md")):
        command.add_argument("--results", default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    os.makedirs(args.results, exist_ok=True)
    if args.command == "page":
        write_page(args.results)
        return 0
    failed = 0
    for model in args.models:
        for way in args.ways:
            if MODELS[model].ways is not None and way not in MODELS[model].ways:
                continue
            if os.path.exists(path_of(model, way, args.ranks, args.results)) and not args.again:
                continue
            try:
                run(model, way, args)
            except RunFailed as error:
                print(f"[large] {error}", file=sys.stderr)
                failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""A transformer that fully_shard has sharded: its own reduce-scatter against compressed ones; a section of docs/fsdp.md.

    python benchmarks/fsdp.py run --data DIR
    python benchmarks/fsdp.py page

Each run is a job of real ranks under torchrun, and its result a file in benchmarks/results/fsdp; a run whose result is there is not
repeated. All runs take about an hour on two idle cores.
"""

import argparse
import json
import os
import sys

from _lib import EXAMPLES, ROOT, SHARED_CORES, RunFailed, as_markdown, finish
from _page import days, keep, part_of, read_part, write_section

sys.path.insert(0, EXAMPLES)
from _launch import torchrun  # noqa: E402

RESULTS = os.path.join(ROOT, "benchmarks", "results", "fsdp")
WORKER = os.path.join(ROOT, "benchmarks", "_fsdp_worker.py")
TASK = "gpt"
DENSE, HALF = "fully_shard, float32", "fully_shard, bfloat16"
#: By label: compression, or the dtype of torch's own reduce-scatter; and the memory.
METHODS = {
    DENSE: ("float32", None),
    HALF: ("bfloat16", None),
    "8 bits": ("dense/qsgd:8", "residual:bits=8"),
    "4 bits, the default": ("dense/qsgd:4", "residual:bits=8"),
    "4 bits, entropy-coded": ("dense/qsgd:4:entropy=ans", "residual:bits=8"),
    "top-k 5 %": ("topk:0.05/auto/lloyd", "residual"),
}


def path_of(label: str, seed: int, folder: str) -> str:
    return os.path.join(folder, "".join(c if c.isalnum() else "-" for c in label) + f"_{seed}.json")


def run(label: str, seed: int, args) -> None:
    """Train once, and keep the result. Raises RunFailed."""
    compression, memory = METHODS[label]
    out = path_of(label, seed, args.results)
    options = {
        "task": TASK,
        "seed": seed,
        "steps": args.steps,
        "compression": compression,
        "memory": memory,
        "data": args.data,
        "out": part_of(out),
    }
    finish(f"{label}, seed {seed}", [*torchrun(args.ranks), WORKER, json.dumps(options)], args.timeout, SHARED_CORES)
    found = read_part(out)
    described = {key: options[key] for key in ("task", "seed", "steps", "compression", "memory")}
    keep(found | {"label": label, **described, "ranks": args.ranks}, out)


def write_page(folder: str) -> str:
    """Write the section of docs/fsdp.md, and return the page's path."""
    found: dict[str, list[dict]] = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name)) as file:
            one = json.load(file)
        found.setdefault(one["label"], []).append(one)
    ends = {label: [one["curve"][-1] for one in runs] for label, runs in found.items()}
    losses = {label: sum(end["loss"] for end in mine) / len(mine) for label, mine in ends.items()}
    sent = {label: sum(end["bytes_sent"] for end in mine) / len(mine) for label, mine in ends.items()}
    rows = [["", "loss", "seeds", "against float32, %", "bits a gradient", "fewer bytes than bfloat16"]]
    for label in (label for label in METHODS if label in found):
        one = found[label][0]
        elements = one["parameters"] * one["steps"] * (one["ranks"] - 1) / one["ranks"]
        rows.append(
            [
                label,
                f"{losses[label]:.3f}",
                str(len(found[label])),
                "" if label == DENSE else f"{100 * (losses[label] / losses[DENSE] - 1):+.2f}",
                f"{8 * sent[label] / elements:.2f}",
                f"{2 * elements / sent[label]:.2f}×",
            ]
        )
    one, dates = found[DENSE][0], [one["date"] for runs in found.values() for one in runs]
    text = "\n\n".join(
        [
            f"The transformer of [transformers.md](transformers.md) with 1.3 million parameters, AdamW, {one['steps']} steps, "
            f"{one['ranks']} ranks; the reduce-scatter in different ways, all else alike. Bits of what crosses for each gradient "
            f"of another rank's slice, headers and padding included; fully_shard's own are computed.",
            as_markdown(rows),
            f"Measured {days(dates)} on {one['machine']}, by `python benchmarks/fsdp.py`.",
        ]
    )
    return write_section(os.path.join(ROOT, "docs"), "fsdp", "Loss and bytes", text, "fsdp.md")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trains = commands.add_parser("run", help="train, and keep the results")
    trains.add_argument("--data", required=True, help="folder in which the text's tokens are kept")
    trains.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    trains.add_argument("--seeds", type=int, nargs="+", default=[0])
    trains.add_argument("--steps", type=int, default=3000)
    trains.add_argument("--ranks", type=int, default=4)
    trains.add_argument("--timeout", type=float, default=3600, help="seconds of one run")
    for command in (trains, commands.add_parser("page", help="write the section of docs/fsdp.md")):
        command.add_argument("--results", default=RESULTS)
    args = parser.parse_args()
    if args.command == "page":
        print(write_page(args.results))
        return
    args.data, args.results = os.path.abspath(args.data), os.path.abspath(args.results)
    os.makedirs(args.results, exist_ok=True)
    for seed in args.seeds:
        for label in args.methods:
            if not os.path.exists(path_of(label, seed, args.results)):
                run(label, seed, args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[fsdp] error: {error}")

"""A recommendation model, whose gradients are inherently sparse: DeepReduce's Table 6 and Figure 19; writes docs/ncf.md.

    python benchmarks/ncf.py run --data DIR
    python benchmarks/ncf.py links --data DIR
    python benchmarks/ncf.py page

The ratings are those of MovieLens 100k, which the Python package RecBole has among its examples; its wheel is fetched to DIR. `links`
needs root, for mpirun/hosts. Each result is a file in benchmarks/results/ncf, and a run whose result is there is not repeated. About
an hour on two idle cores.
"""

import argparse
import glob
import json
import os
import statistics
import subprocess
import sys
import zipfile

from _hosts import Hosts, Job, JobFailed
from _lib import ROOT, SHARED_CORES, RunFailed, as_markdown, launch
from _page import days, keep, part_of, read_part

RESULTS = os.path.join(ROOT, "benchmarks", "results", "ncf")
WORKER = os.path.join(ROOT, "benchmarks", "_ncf_worker.py")
PACKAGE, RATINGS = "recbole==1.2.1", "recbole/dataset_example/ml-100k/ml-100k.inter"
RANKS, EVERY = 4, 50  # steps between evaluations
DENSE, COMPUTE = "Horovod float32", "compute alone"
#: Tables whose gradients are small beside those of the other tensors, and a spec that ranks them by themselves.
SMALL, OWN = ("users.weight", "items.weight"), "topk:0.1:per=tensor/auto/lloyd:0.05"
#: By label: the library and its arguments. Values that are quantized without a bias need no memory.
METHODS = {
    COMPUTE: ("none", {}),
    DENSE: ("horovod", {"compression": "none"}),
    "Horovod fp16": ("horovod", {"compression": "fp16"}),
    "SKCompress": ("grace_ext", {"compression": "nonzero/huffman/sketchml:128:entropy=huffman", "memory": "none"}),
    "DeepReduce, BF-P0 with QSGD": (
        "grace_ext",
        {"compression": "nonzero/bloom:p0:fpr=0.6/qsgd:7:bucket=512:norm=l2", "memory": "none"},
    ),
    "nonzero, shortest index codec, QSGD": ("grace_ext", {"compression": "nonzero/auto/qsgd:7", "memory": "none"}),
    "nonzero, shortest index codec, exact": ("grace_ext", {"compression": "nonzero/auto/raw", "memory": "none"}),
    "grace_ext, default": ("grace_ext", {}),
    "grace_ext, default, two tables ranked by themselves": ("grace_ext", {"rules": dict.fromkeys(SMALL, OWN)}),
    "grace_ext, top-k 10 %": ("grace_ext", {"compression": "topk:0.1/auto/lloyd:0.05", "memory": "residual"}),
    "grace_ext, top-k 3 % of 64": ("grace_ext", {"compression": "topk:0.03:per=64/auto/lloyd:0.05", "memory": "residual"}),
}


def path_of(label: str, which: str, folder: str) -> str:
    """Name a result. which: "seed0", …, or the rate of the links."""
    return os.path.join(folder, "".join(c if c.isalnum() else "-" for c in label) + f"_{which}.json")


def ratings_in(folder: str) -> str:
    """Return the path of the ratings; fetch them if they are not there. Raises RunFailed."""
    found = os.path.join(folder, os.path.basename(RATINGS))
    if not os.path.exists(found):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        if subprocess.run(command).returncode:
            raise RunFailed(f"{PACKAGE}, which has the ratings, could not be fetched")
        [wheel] = glob.glob(os.path.join(folder, "recbole-*.whl"))
        with zipfile.ZipFile(wheel) as archive, open(found + ".new", "wb") as file:
            file.write(archive.read(RATINGS))
        os.replace(found + ".new", found)
    return found


def options_of(label: str, seed: int, steps: int, out: str, measure: bool, args) -> dict:
    library, arguments = METHODS[label]
    described = {"seed": seed, "steps": steps, "batch": args.batch, "library": library, "arguments": arguments}
    return {**described, "measure": measure, "every": EVERY, "ratings": ratings_in(args.data), "out": part_of(out)}


def complete(out: str, label: str, options: dict, **more) -> None:
    """Complete a result with what it was made with."""
    found = read_part(out)
    described = {key: options[key] for key in ("seed", "steps", "batch", "library", "arguments")}
    keep({"label": label, **described, "ranks": RANKS, **more, **found}, out)


def run(args) -> None:
    for seed in args.seeds:
        for label in args.methods:
            out = path_of(label, f"seed{seed}", args.results)
            if os.path.exists(out) or label == COMPUTE:
                continue
            options = options_of(label, seed, args.steps or 1500, out, False, args)
            launch(f"{label}, seed {seed}", WORKER, [json.dumps(options)], RANKS, args.timeout, SHARED_CORES)
            complete(out, label, options)


def links(args) -> None:
    with Hosts("ncf", RANKS, "none") as up:
        for rate in args.rates:
            up("rate", rate)
            for label in args.methods:
                out = path_of(label, rate, args.results)
                if os.path.exists(out):
                    continue
                options = options_of(label, 0, args.steps or 60, out, True, args)
                try:
                    Job(up, "horovodrun --gloo", RANKS, [WORKER, json.dumps(options)]).end(args.timeout)
                except JobFailed as error:
                    raise RunFailed(f"{label}, {rate}: {error}") from error
                complete(out, label, options, rate=rate)


def read(folder: str) -> dict[str, dict[str, dict]]:
    """Read all results: label -> "seed0" or rate -> result."""
    found: dict[str, dict[str, dict]] = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path) as file:
            result = json.load(file)
        found.setdefault(result["label"], {})[os.path.basename(path)[:-5].rsplit("_", 1)[1]] = result
    return {label: found[label] for label in METHODS if label in found}


def gained(results: list[dict], dense: list[dict]) -> float:
    """Compute the mean points of hit rate above those of Horovod float32 with the same seeds."""
    of = {one["seed"]: one["hit_rate"] for one in dense}
    return statistics.mean(100 * (one["hit_rate"] - of[one["seed"]]) for one in results)


def page(args) -> None:
    found = read(args.results)
    runs = {label: [one for which, one in results.items() if which.startswith("seed")] for label, results in found.items()}
    runs = {label: results for label, results in runs.items() if results}
    first = runs[DENSE][0]
    rows = [["method", "best hit rate of 10", "seeds", "from … to", "points", "relative volume", "bytes a step"]]
    for label, results in runs.items():
        rates = [one["hit_rate"] for one in results]
        volume = statistics.mean(one["bytes_sent"] / (4 * one["parameters"] * one["steps"]) for one in results)
        sent = statistics.mean(one["bytes_sent"] / one["steps"] for one in results)
        rows.append(
            [
                label,
                f"{statistics.mean(rates):.4f}",
                str(len(rates)),
                f"{min(rates):.4f} … {max(rates):.4f}",
                "" if label == DENSE else f"{gained(results, runs[DENSE]):+.1f}",
                f"{volume:.4f}",
                f"{sent:,.0f}",
            ]
        )
    text = [
        "# An inherently sparse model",
        "Written by `benchmarks/ncf.py`; do not edit. NeuMF (He et al., WWW 2017) on who has rated what in MovieLens 100k, with "
        f"{first['parameters']:,} parameters, most of them in four tables of users and films, {RANKS} ranks, "
        f"{first['steps']:,} steps of {first['batch']:,} samples a rank, Adam. {100 * first['density']:.0f} % of the elements of a "
        "gradient are not zero. The last film of each user is held out, and has to be among the ten best of it and 99 others. This is what "
        "Table 6 of DeepReduce shows of MovieLens 20M, on a smaller data set and with smaller batches.",
        as_markdown(rows),
        "The volume is relative to float32 of all elements, headers and small tensors included. DeepReduce's has QSGD of 7 bits in "
        "buckets of 512 and a Bloom filter with a rate of false positives of 0.6; where so many elements are not zero, a filter is "
        "longer than a bit for each of those.",
        "Points are those above Horovod float32 with the same seeds. Where top-k ranks the elements of all tensors together, two of the "
        "tables are hardly ever sent, whose gradients are small beside the others' "
        "([a warning](observability.md#warnings) names them after 512 steps), and training lags behind. Elements can be ranked among those "
        f"of their tensor, here with `rules` for these two, `{OWN}`, or among 64 neighbors, a row of a table.",
    ]
    rates = sorted({which for results in found.values() for which in results if not which.startswith("seed")}, key=_by_rate)
    if rates:
        rows = [["ms a step", *(column for rate in rates for column in (rate, "of that codecs", "times float32"))]]
        for label, results in found.items():
            row = [label]
            for rate in rates:
                one, dense = results.get(rate), found[DENSE].get(rate)
                row += (
                    ["", "", ""]
                    if one is None or dense is None
                    else [
                        f"{one['ms_per_step']:.1f}",
                        f"{one['ms_codecs']:.1f}" if "ms_codecs" in one else "",
                        f"{dense['ms_per_step'] / one['ms_per_step']:.2f}",
                    ]
                )
            rows.append(row)
        text += ["## A step over limited links", f"{RANKS} hosts with one rank each (Figure 19).", as_markdown(rows)]
    dates = [one["date"] for results in found.values() for one in results.values()]
    text.append(
        f"Measured {days(dates)} on {first['machine']}; by `python benchmarks/ncf.py run --data DIR`, `links` and "
        "`page`. Each result, with its commit, is in `benchmarks/results/ncf`."
    )
    path = os.path.join(args.out, "ncf.md")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n\n".join(text) + "\n")
    print(path)


def _by_rate(rate: str) -> float:
    return {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[rate[-4:]] * float(rate[:-4])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trains = commands.add_parser("run", help="train, and keep hit rates and bytes")
    trains.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    limited = commands.add_parser("links", help="measure steps on hosts with limited links")
    limited.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="as for mpirun/hosts")
    for command in (trains, limited):
        command.add_argument("--data", required=True, help="folder for the ratings")
        command.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
        command.add_argument("--steps", type=int, help="for a trial, with another --results")
        command.add_argument("--batch", type=int, default=2000, help="samples of a rank and step")
        command.add_argument("--timeout", type=float, default=1800, help="seconds of one run")
    writes = commands.add_parser("page", help="write docs/ncf.md")
    writes.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of the page")
    for command in commands.choices.values():
        command.add_argument("--results", default=RESULTS)
    args = parser.parse_args()
    if args.command != "page":
        args.data, args.results = os.path.abspath(args.data), os.path.abspath(args.results)
        os.makedirs(args.results, exist_ok=True)
    {"run": run, "links": links, "page": page}[args.command](args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[ncf] error: {error}")

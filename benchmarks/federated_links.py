"""Seconds of a federated round's messages over limited links, as in DeepReduce's Table 4; writes a section of docs/federated.md.

    python benchmarks/federated_links.py --data DIR

Each client is on a host of its own (mpirun/hosts, which needs root), whose link is limited; the server's link is not. Methods and
training are those of benchmarks/federated.py. Results are kept in benchmarks/results/federated-links, and a run whose result is
there is not repeated. About 10 minutes.
"""

import json
import os
import sys

from _hosts import Hosts, Job, JobFailed
from _lib import ROOT, RunFailed, as_markdown, machine
from _page import keep, parse_results, part_of, read_part, results_parser, write_section
from federated import FEDAVG, METHODS

WORKER = os.path.join(ROOT, "benchmarks", "_federated_links_worker.py")
RESULTS = os.path.join(ROOT, "benchmarks", "results", "federated-links")
TOP_R, BEST = "topr", "dr-bf-p0-qsgd"
#: What Table 4 says of 100 Mbit/s: seconds to a client and from a client.
PAPER = {
    FEDAVG: (1.3980, 1.3609),
    TOP_R: (0.3167, 0.3904),
    "dr-bf-p0": (0.1936, 0.1957),
    "dr-fit-poly": (0.1742, 0.1429),
    BEST: (0.0852, 0.0859),
}
CODECS = ("client_decodes", "client_encodes", "server_decodes", "server_encodes")


def measure(args) -> None:
    with Hosts("federated", args.clients + 1, "none") as up:
        for rate in args.rates:
            up("rate", rate)
            up("rate", "none", 1)
            for name in args.methods:
                out = path_of(args.results, rate, name)
                if os.path.exists(out):
                    continue
                options = {"data": args.data, "compression": METHODS[name].spec, "rounds": args.rounds, "out": part_of(out)}
                try:
                    Job(up, "mpirun", args.clients + 1, [WORKER, json.dumps(options)]).end(args.timeout)
                except JobFailed as error:
                    raise RunFailed(f"{name}, {rate}: {error}") from error
                found = read_part(out) | {"clients": args.clients, "rounds": args.rounds}
                keep(found, out)
                print(f"[federated_links] {name}, {rate}: {found['down']:.4f} s down, {found['up']:.4f} s up", flush=True)


def path_of(folder: str, rate: str, name: str) -> str:
    return os.path.join(folder, f"{rate}_{name}.json")


def total(found: dict) -> float:
    """The seconds of the messages and of the codecs of one client's round."""
    return found["down"] + found["up"] + sum(found[name] for name in CODECS)


def table(found: dict[str, dict], rate: str) -> list[list[str]]:
    has_paper = rate == "100mbit"
    rows = [
        [
            "",
            "kB down",
            "kB up",
            "ms down",
            "ms up",
            "ms of codecs",
            "times faster than float32",
            "than Top-r",
            *(("paper: ms down", "ms up", "faster than the baseline", "than Top-r") if has_paper else ()),
        ]
    ]
    for name, run in found.items():
        faster = [f"{total(found[other]) / total(run):.1f}" if other in found else "" for other in (FEDAVG, TOP_R)]
        row = [
            METHODS[name].label,
            *(f"{run[way] / 1000:,.1f}" for way in ("down_bytes", "up_bytes")),
            *(f"{1000 * run[way]:.1f}" for way in ("down", "up")),
            f"{1000 * sum(run[codec] for codec in CODECS):.1f}",
            *faster,
        ]
        if has_paper:
            paper = PAPER.get(name)
            stated = {BEST: ("7.8", "2.2")}.get(name, ("", ""))
            row += [*(f"{1000 * seconds:.0f}" for seconds in paper), *stated] if paper else [""] * 4
        rows.append(row)
    return rows


def page(args) -> None:
    parts = []
    runs = []
    for rate in args.rates:
        found = {}
        for name in METHODS:
            if os.path.exists(path := path_of(args.results, rate, name)):
                with open(path) as file:
                    found[name] = json.load(file)
        if found:
            runs += found.values()
            parts.append(f"Links of {rate[:-4]} {rate[-4].upper()}bit/s:\n\n{as_markdown(table(found, rate))}")
    if not runs:
        raise RunFailed("there are no results")
    some, dates, tables = runs[0], sorted({run["date"] for run in runs}), "\n\n".join(parts)
    text = f"""\
Written by `benchmarks/federated_links.py`; do not edit. The FedAvg of the table above, {some["clients"]} clients, each on a host whose
link is limited in both directions; the server's is not. From when a message is handed over to MPI until it has arrived, and the codecs'
CPU time of one client and, for one update, of the server: medians of all clients and of {some["rounds"]} rounds but the first two. All
clients' messages are under way at the same time. The model has {some["parameters"]:,} parameters, DeepReduce's, which predicts words,
about 8 times as many, so that times are to be compared with each other only.

{tables}

Measured on {" and ".join(dates)} on {machine()}, all hosts on the same cores, by `python benchmarks/federated_links.py --data DIR`.
"""
    print(write_section(args.out, "federated-links", "Over limited links", text, "federated.md"))


def main() -> None:
    parser = results_parser(__doc__, "folder of the data set (see mpirun/fetch_fashion_mnist.py)", "federated.md", RESULTS)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "10mbit"], help="rates of the links, as for mpirun/hosts")
    names = [name for name, method in METHODS.items() if method.training == FEDAVG]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one run")
    args = parse_results(parser)
    if not args.page:
        measure(args)
    page(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[federated_links] error: {error}")

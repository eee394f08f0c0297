"""Local steps while workers die and others come, against a run that nothing disturbs; writes a section of docs/local-steps.md.

    python benchmarks/churn.py --data DIR

Elastic Horovod with a host discovery script; the transformer of benchmarks/transformer.py. Every --every rounds a worker is killed, and
--after rounds later another comes. Results are kept in benchmarks/results/churn, and a run whose result is there is not repeated. Ends
with status 1 if the target is missed. About 15 minutes for each seed on two idle cores.
"""

import json
import os
import statistics
import sys
import tempfile

from _lib import ROOT, SHARED_CORES, RunFailed, as_markdown, finish, horovodrun, machine
from _page import by_seed, keep, parse_results, part_of, path_of, read_part, results_parser, write_section

WORKER = os.path.join(ROOT, "benchmarks", "_churn_worker.py")
RESULTS = os.path.join(ROOT, "benchmarks", "results", "churn")
KINDS = {"undisturbed": "nothing happens", "killed": "a worker is killed, another comes"}
#: Names of this machine: Horovod takes each for a host, and uses a host no more on which a worker died.
FIRST = "localhost"
OTHERS = ("127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f.1", "0177.1", "0x7f000001", "017700000001")
WORSE = 1.0  # the target, in percent of the loss
GIVEN = ("task", "ranks", "length", "rounds", "every", "after")


def launcher(ranks: int, script: str | None) -> list[str]:
    *command, python = horovodrun(ranks)
    command += ["--gloo", "--network-interfaces", "lo"]
    if script:
        command += ["--min-np", str(ranks - 1), "--max-np", str(ranks), "--host-discovery-script", script]
    return [*command, python]


def measure(kind: str, seed: int, args) -> None:
    out = path_of(args.results, kind, seed)
    if os.path.exists(out):
        return
    options = {name: getattr(args, name) for name in (*GIVEN, "data")} | {"seed": seed, "out": part_of(out)}
    options |= {"names": OTHERS, "contents": [f"{FIRST}:{args.ranks - 1}\n{other}:1\n" for other in OTHERS]}
    # So long survivors wait that have no connection to the dead. It has to be longer than a new worker takes to start.
    env = {**SHARED_CORES, "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
    with tempfile.TemporaryDirectory() as folder:
        script = None
        if kind == "killed":
            script, options["hosts"] = os.path.join(folder, "discover.sh"), os.path.join(folder, "hosts")
            with open(options["hosts"], "w") as file:
                file.write(options["contents"][0])
            with open(script, "w") as file:
                file.write(f"#!/bin/sh\ncat '{options['hosts']}'\n")
            os.chmod(script, 0o755)
        finish(f"{kind}, seed {seed}", [*launcher(args.ranks, script), WORKER, json.dumps(options)], args.timeout, env)
    found = read_part(out)
    keep({**{name: getattr(args, name) for name in GIVEN}, **found}, out)
    print(f"[churn] {kind}, seed {seed}: loss {found['loss']:.4f}, {found['visited']}", flush=True)


def page(args) -> int:
    found = {kind: by_seed(args.results, kind) for kind in KINDS}
    seeds = sorted(found["undisturbed"].keys() & found["killed"].keys())
    if not seeds:
        raise RunFailed(f"{args.results} has no seed of which both runs are there")
    rows = [["", "seeds", "loss", "rounds made", "ranks", "local steps made again", "minutes"]]
    for kind, label in KINDS.items():
        runs = [found[kind][seed] for seed in seeds]
        rows.append(
            [
                label,
                str(len(runs)),
                f"{statistics.mean(run['loss'] for run in runs):.4f}",
                ", ".join(sorted({f"{run['rounds_made']} of {run['rounds']}" for run in runs})),
                " → ".join(str(ranks) for _, ranks in runs[0]["visited"]),
                f"{statistics.mean(run['repeated'] for run in runs):.0f}",
                f"{statistics.mean(run['seconds'] for run in runs) / 60:.1f}",
            ]
        )
    worse = [100 * (found["killed"][seed]["loss"] / found["undisturbed"][seed]["loss"] - 1) for seed in seeds]
    complete = all(run["rounds_made"] == run["rounds"] for seed in seeds for run in (found[kind][seed] for kind in KINDS))
    is_met = complete and statistics.mean(worse) <= WORSE
    some, dates = found["killed"][seeds[0]], sorted({run["date"] for runs in found.values() for run in runs.values()})
    text = f"""\
Written by `benchmarks/churn.py`; do not edit. The transformer of 1.3 million parameters, {some["ranks"]} ranks, preset `sparseloco`,
{some["rounds"]} rounds of {some["length"]} local steps. Every {some["every"]} rounds a worker is killed in the middle of a round, and
{some["after"]} rounds later another one comes, which knows nothing. Each rank commits once in a round.

{as_markdown(rows)}

With workers that are killed the loss is {statistics.mean(worse):+.2f} % ({", ".join(f"{one:+.2f}" for one in worse)}).
The target, no round lost and a loss at most {WORSE:g} % above, is {"met" if is_met else "**missed**"}. Minutes include those in
which workers start, and one for each death: so long those wait that had no connection to the dead
(`HOROVOD_GLOO_TIMEOUT_SECONDS=60`).

Measured on {" and ".join(dates)} on {machine()}, all ranks on the same cores, by `python benchmarks/churn.py --data DIR`.
"""
    print(write_section(args.out, "churn", "Workers that die, and others that come", text, "local-steps.md"))
    return 0 if is_met else 1


def main() -> int:
    parser = results_parser(__doc__, "folder in which the tokens are kept", "local-steps.md", RESULTS)
    parser.add_argument("--task", default="gpt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--length", type=int, default=10, help="local steps in a round")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="rounds from one death to the next")
    parser.add_argument("--after", type=int, default=5, help="rounds after a death until another worker comes")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds of one run")
    args = parse_results(parser)
    if (args.rounds - 1) // args.every >= len(OTHERS):
        parser.error(f"more than {len(OTHERS) - 1} workers would be killed, and {FIRST} has no more names")
    if not args.page:
        for seed in args.seeds:
            for kind in KINDS:
                measure(kind, seed, args)
    return page(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[churn] error: {error}")

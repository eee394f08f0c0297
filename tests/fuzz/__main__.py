"""Faults looked for at random, for as long as one likes: `make fuzz`, or

    python tests/fuzz --minutes 60
    python tests/fuzz --programs 2000 --faults 300 --containers 1000000 --messages 100000 --record docs/reliability.md

Each kind goes on until its share of the minutes is over or, where one is told, its count is reached. What was found is in
--out, as scripts and commands that show it again; the exit status is then 1. The same --seed tries the same. --record keeps
the last run of each kind: a kind of which none are wanted (--faults 0) stays as it was.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import importlib
import itertools
import json
import multiprocessing
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"  # by kind, what its last run came to
sys.path += [str(ROOT / folder) for folder in ("tests", "benchmarks")]

import faulty_ranks  # noqa: E402
from _lib import as_markdown, machine  # noqa: E402
from _page import commit, write_section  # noqa: E402
from fuzzing import Found  # noqa: E402


@dataclasses.dataclass
class Kind:
    """title: what is tried; its outcomes, of `module`.batch(seed), are counted. share: of the minutes. jobs: how many
    batches run at a time. may_crash: one, in a process of its own, for a crash would end it without a word."""

    title: str
    module: str
    share: float
    jobs: int = 1
    may_crash: bool = False
    tried: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    found: int = 0
    seconds: float = 0.0


KINDS = {
    "programs": Kind("training loops, beside the plain library's", "program_jobs", 0.4, jobs=2),
    "faults": Kind("ranks that raise, leave, are killed or stopped", "faulty_ranks", 0.4, jobs=3),
    "containers": Kind("hostile containers", "hostile_containers", 0.1, may_crash=True),
    "messages": Kind("messages of hostile federated clients", "hostile_clients", 0.1, may_crash=True),
}


class Batches:
    """Runs the batches of a kind, some at a time."""

    def __init__(self, kind: Kind, first: int):
        self._kind, self._seeds = kind, itertools.count(first)
        self._batch = importlib.import_module(kind.module).batch
        self._pool = self._new_pool()
        self._running: dict[concurrent.futures.Future, int] = {}

    def _new_pool(self) -> concurrent.futures.Executor:
        if self._kind.may_crash:
            return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        return concurrent.futures.ThreadPoolExecutor(self._kind.jobs)

    def results(self, goes_on):
        """Of those that end: (seed, what came of it, or None; what was found, or None). As long as goes_on()."""
        while goes_on() or self._running:
            while goes_on() and len(self._running) < self._kind.jobs:
                seed = next(self._seeds)
                self._running[self._pool.submit(self._batch, seed)] = seed
            done, _ = concurrent.futures.wait(self._running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                seed = self._running.pop(future)
                try:
                    yield seed, future.result(), None
                except Found as found:
                    yield seed, None, str(found)
                except concurrent.futures.BrokenExecutor:
                    self._pool = self._new_pool()
                    yield (
                        seed,
                        None,
                        (f"# the process crashed\nimport {self._kind.module}\n{self._kind.module}.batch({seed})\n"),
                    )
        self._pool.shutdown()


def look_for(name: str, kind: Kind, first: int, count: int | None, seconds: float, out: Path) -> None:
    began, said = time.monotonic(), 0.0

    def goes_on() -> bool:
        return kind.tried.total() < count if count is not None else time.monotonic() - began < seconds

    for seed, came, found in Batches(kind, first).results(goes_on):
        kind.tried += came or collections.Counter({"**found**": 1})
        if found:
            kind.found += 1
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{name}-{seed}.txt"
            path.write_text(found)
            print(f"[fuzz] {name}, seed {seed}: found, see {path}", flush=True)
        kind.seconds = time.monotonic() - began
        if kind.seconds - said > 30:
            said = kind.seconds
            print(f"[fuzz] {name}: {kind.tried.total():,} tried, {kind.found} found, {said:.0f} s", flush=True)


def results_of(kinds: dict[str, Kind], run: dict) -> dict[str, dict]:
    """By kind; run: what is known of the whole run."""
    return {
        name: {"tried": dict(kind.tried.most_common()), "found": kind.found, "minutes": kind.seconds / 60, **run}
        for name, kind in kinds.items()
        if kind.tried
    }


def document(results: dict[str, dict]) -> str:
    rows = [["what is drawn at random", "tried", "what came of it", "faults found", "minutes", "date, commit, options"]]
    for name, kind in KINDS.items():
        if run := results.get(name):
            came = "; ".join(f"{outcome} {count:,}" for outcome, count in run["tried"].items())
            rows.append(
                [
                    kind.title,
                    f"{sum(run['tried'].values()):,}",
                    came,
                    str(run["found"]),
                    f"{run['minutes']:.1f}",
                    f"{run['date']}, {run['commit']}, `--{name} {sum(run['tried'].values())} --seed {run['seed']}`",
                ]
            )
    table = as_markdown(rows).replace("|---|--:|--:|", "|---|--:|---|")
    machines = "; ".join(sorted({run["machine"] for run in results.values()}))
    return f"{table}\n\nOn {machines}, by `python tests/fuzz`; with the options, it tries the same again.\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="of all kinds together (default: %(default)s)")
    for name, kind in KINDS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{kind.title}: so many, however long it takes")
    parser.add_argument(
        "--limit",
        type=float,
        default=60,
        help="seconds after a rank's fault in which its job has to be "
        "over (default: %(default)s, for a machine that does nothing else)",
    )
    parser.add_argument("--seed", type=int, help="(default: another one each time)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="PAGE",
        help="write the table into a section of this page, with the last runs of the other kinds",
    )
    args = parser.parse_args()
    seed = int(time.time()) % 10**6 * 1000 if args.seed is None else args.seed
    faulty_ranks.LIMIT, faulty_ranks.STOPPED = args.limit, None
    run = {"seed": seed, "date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine()}
    print(f"[fuzz] from seed {seed} on", flush=True)
    for name, kind in KINDS.items():
        if getattr(args, name) != 0:
            look_for(name, kind, seed, getattr(args, name), 60 * args.minutes * kind.share, args.out)
    results = results_of(KINDS, run)
    print(document(results))
    if args.record:
        results = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | results
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        text = document(results)
        write_section(str(args.record.resolve().parent), "fuzz", "Random fault search", text, args.record.name)
    return 1 if any(kind.found for kind in KINDS.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

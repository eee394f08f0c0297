"""Faults looked for at random, for as long as one likes: `make fuzz`, or

    python tests/fuzz --minutes 60
    python tests/fuzz --programs 2000 --faults 300 --containers 1000000 --messages 100000 --record docs/reliability.md

Each kind goes on until its share of the minutes is over or, where one is told, its count is reached. What was found is in
--out, as scripts and commands that show it again; the exit status is then 1. The same --seed tries the same.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib
import multiprocessing
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests", "tests/mpi", "benchmarks", "examples")]

import faulty_ranks  # noqa: E402
from _page import write_section  # noqa: E402
from compare_fashion_mnist import as_markdown, machine  # noqa: E402
from fuzzing import Found  # noqa: E402


@dataclasses.dataclass
class Kind:
    """title: what is tried; its outcomes, of `module`.batch(seed), are counted. share: of the minutes. may_crash: its
    batches run in a process of their own, for a crash would end them without a word."""

    title: str
    module: str
    share: float
    may_crash: bool = False
    tried: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    found: int = 0
    seconds: float = 0.0


KINDS = {
    "programs": Kind("training loops, beside the plain library's", "program_jobs", 0.4),
    "faults": Kind("ranks that raise, leave, are killed or stopped", "faulty_ranks", 0.4),
    "containers": Kind("hostile containers", "hostile_containers", 0.1, may_crash=True),
    "messages": Kind("messages of hostile federated clients", "hostile_clients", 0.1, may_crash=True),
}


class Batches:
    """Runs the batches of a kind."""

    def __init__(self, kind: Kind, stack: contextlib.ExitStack):
        self._kind, self._stack = kind, stack
        self._batch = importlib.import_module(kind.module).batch
        self._pool = self._new_pool() if kind.may_crash else None

    def _new_pool(self) -> concurrent.futures.Executor:
        return self._stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))

    def run(self, seed: int) -> collections.Counter:
        """Raises Found."""
        if self._pool is None:
            return self._batch(seed)
        try:
            return self._pool.submit(self._batch, seed).result()
        except concurrent.futures.BrokenExecutor:
            self._pool = self._new_pool()
            raise Found(f"# the process crashed\nimport {self._kind.module}\n{self._kind.module}.batch({seed})\n") from None


def look_for(name: str, kind: Kind, seed: int, count: int | None, seconds: float, out: Path) -> None:
    began, said = time.monotonic(), 0.0
    with contextlib.ExitStack() as stack:
        batches = Batches(kind, stack)
        while kind.tried.total() < count if count is not None else kind.seconds < seconds:
            try:
                kind.tried += batches.run(seed)
            except Found as found:
                kind.found += 1
                kind.tried["**found**"] += 1
                out.mkdir(parents=True, exist_ok=True)
                path = out / f"{name}-{seed}.txt"
                path.write_text(str(found))
                print(f"[fuzz] {name}, seed {seed}: found, see {path}", flush=True)
            seed += 1
            kind.seconds = time.monotonic() - began
            if kind.seconds - said > 30:
                said = kind.seconds
                print(f"[fuzz] {name}: {kind.tried.total():,} tried, {kind.found} found, {said:.0f} s", flush=True)


def document(kinds: dict[str, Kind], seed: int) -> str:
    rows = [["what is drawn at random", "tried", "what came of it", "faults found", "minutes"]]
    for kind in kinds.values():
        came = "; ".join(f"{outcome} {count:,}" for outcome, count in kind.tried.most_common())
        rows.append([kind.title, f"{kind.tried.total():,}", came, str(kind.found), f"{kind.seconds / 60:.1f}"])
    table = as_markdown(rows).replace("|---|--:|--:|", "|---|--:|---|")
    return f"{table}\n\nFrom seed {seed} on, {datetime.date.today()}, on {machine()}, by `python tests/fuzz`.\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="of all kinds together (default: %(default)s)")
    for name, kind in KINDS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{kind.title}: so many, however long it takes")
    parser.add_argument("--limit", type=float, default=60, help="seconds after a rank's fault in which its job has to be over "
                        "(default: %(default)s, for a machine that does nothing else)")
    parser.add_argument("--seed", type=int, help="(default: another one each time)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--record", type=Path, metavar="PAGE", help="write the table into a section of this page")
    args = parser.parse_args()
    seed = int(time.time()) % 10**6 * 1000 if args.seed is None else args.seed
    faulty_ranks.LIMIT, faulty_ranks.STOPPED = args.limit, None
    print(f"[fuzz] from seed {seed} on", flush=True)
    for name, kind in KINDS.items():
        if getattr(args, name) != 0:
            look_for(name, kind, seed, getattr(args, name), 60 * args.minutes * kind.share, args.out)
    text = document(KINDS, seed)
    print(text)
    if args.record:
        write_section(str(args.record.resolve().parent), "fuzz", "Faults looked for at random", text, args.record.name)
    return 1 if any(kind.found for kind in KINDS.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

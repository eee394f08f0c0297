"""Faults looked for at random, for as long as one likes: `make fuzz`, or

    python tests/fuzz --minutes 60
    python tests/fuzz --programs 2000 --faults 300 --containers 1000000 --messages 100000 --record docs/reliability.md

Each kind goes on until its share of the minutes is over or its count is reached. What was found is in --out, as scripts and
commands that show it again; the exit status is then 1. With the same --seed, and as much of it, the same is tried.
"""

import argparse
import collections
import dataclasses
import datetime
import os
import sys
import time
from pathlib import Path

import faults
import hostile_clients
import hostile_containers
import program_jobs
from fuzzing import Found

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from _page import write_section  # noqa: E402
from compare_fashion_mnist import as_markdown, machine  # noqa: E402


@dataclasses.dataclass
class Kind:
    """batch(seed): what came of some tries, by outcome. share: of the minutes."""

    title: str
    batch: object
    share: float
    tried: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    found: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


KINDS = {
    "programs": Kind("training loops, against the plain library", program_jobs.batch, 0.4),
    "faults": Kind("ranks that raise, leave, are killed or stopped", faults.batch, 0.4),
    "containers": Kind("hostile containers", hostile_containers.batch, 0.1),
    "messages": Kind("messages of hostile federated clients", hostile_clients.batch, 0.1),
}


def look_for(name: str, kind: Kind, seed: int, count: int | None, seconds: float, out: Path) -> None:
    began, said = time.monotonic(), 0.0
    while kind.tried.total() < count if count is not None else kind.seconds < seconds:
        try:
            kind.tried += kind.batch(seed)
        except Found as found:
            kind.found.append(f"{name}-{seed}.txt")
            kind.tried["found"] += 1
            out.mkdir(parents=True, exist_ok=True)
            (out / kind.found[-1]).write_text(str(found))
            print(f"[fuzz] {name}, seed {seed}: found, see {out / kind.found[-1]}", flush=True)
        seed += 1
        kind.seconds = time.monotonic() - began
        if kind.seconds - said > 30:
            said = kind.seconds
            print(f"[fuzz] {name}: {kind.tried.total():,} tried, {len(kind.found)} found, {said:.0f} s", flush=True)


def document(kinds: dict[str, Kind], seed: int) -> str:
    rows = [["what is drawn at random", "tried", "what came of it", "faults found", "minutes"]]
    for kind in kinds.values():
        came = "; ".join(f"{outcome} {count:,}" for outcome, count in kind.tried.most_common())
        rows.append([kind.title, f"{kind.tried.total():,}", came, str(len(kind.found)), f"{kind.seconds / 60:.1f}"])
    table = as_markdown(rows).replace("|---|--:|--:|", "|---|--:|---|")
    return f"{table}\n\nFrom seed {seed} on, {datetime.date.today()}, on {machine()}, by `python tests/fuzz`.\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="in all; a kind with a count takes what it takes")
    for name, kind in KINDS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"how many {kind.title} (0: none)")
    parser.add_argument("--seed", type=int, help="(default: another one each time)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--record", type=Path, metavar="PAGE", help="write the table into a section of this page")
    args = parser.parse_args()
    seed = int(time.time()) % 10**6 * 1000 if args.seed is None else args.seed
    print(f"[fuzz] from seed {seed} on", flush=True)
    for name, kind in KINDS.items():
        look_for(name, kind, seed, getattr(args, name), 60 * args.minutes * kind.share, args.out)
    text = document(KINDS, seed)
    print(text)
    if args.record:
        write_section(os.path.dirname(args.record.resolve()), "fuzz", "Faults looked for at random", text, args.record.name)
    return 1 if any(kind.found for kind in KINDS.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

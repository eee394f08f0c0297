"""How many bits the positions of captured gradients take, and how fast they are coded; writes a section of docs/choosing.md.

    python benchmarks/capture.py --out DIR
    python benchmarks/positions.py --gradients DIR

Ends with status 1 if a target is missed. A few minutes on one idle core.
"""

import argparse
import datetime
import os
import sys

from _lib import ROOT, as_markdown, machine
from _page import write_section

from grace_ext import ConfigError, bench
from grace_ext.bench.codecs import index_codecs
from grace_ext.bench.subject import Subject

#: What was captured -> the most that its positions should take at 1 % of gradient + residual, as a share of log2 C(d, k).
TARGETS = {"lm": 0.22, "transformer": 0.6, "cnn": 0.88}
MOST, SPEED = 1.02, 80.0  # the most that any may take; million positions a second, each way
DENSITIES = (0.001, 0.01, 0.1)
JUDGED = 0.01
ZLIB = "zlib, level 6, of the gaps"
HEAD = [
    "top of",
    "density",
    "positions",
    "shortest",
    "share",
    "next best",
    "share",
    "zlib",
    "encoding, M/s",
    "decoding, M/s",
]


def share(row: dict) -> float:
    return row["bits"] / row["bound"]


def measured(name: str, path: str, repetitions: int) -> tuple[list[list[str]], list[str]]:
    """Return the rows of a captured gradient, and the targets that it misses."""
    rows, missed = [], []
    judged = name.endswith("-compensated")
    model, _, _ = name.partition("-")
    label = f"{model}, gradient + residual" if judged else f"{model}, gradient"
    for density in DENSITIES:
        found = {row["stage"]: row for row in index_codecs(Subject(bench.load(path), repetitions, True), density, False)}
        auto = found["auto"]
        codec = found[auto["chosen"]]
        others = [row for stage, row in found.items() if not row["peer"] and row["fpr"] is None and stage != "auto"]
        other = min((row for row in others if row is not codec and row["kept"] is None), key=share)
        speeds = [codec[way]["per_second"] / 1e6 for way in ("encode", "decode")]
        rows.append(
            [
                label,
                f"{100 * density:g} %",
                f"{codec['k']:,}",
                f"`{auto['chosen']}`",
                f"{share(auto):.3f}",
                f"`{other['stage']}`",
                f"{share(other):.3f}",
                f"{share(found[ZLIB]):.3f}",
                *(f"{speed:.0f}" for speed in speeds),
            ]
        )
        least = min(MOST, share(found[ZLIB]), *([TARGETS[model]] if judged and density == JUDGED else []))
        where = f"{label}, {100 * density:g} %"
        if share(auto) > least:
            missed.append(f"{where}: {share(auto):.3f} in place of {least:.3f}")
        slow = [f"{way} {speed:.0f}" for way, speed in zip(("encoding", "decoding"), speeds, strict=True) if speed < SPEED]
        if slow:
            missed.append(f"{where}: {', '.join(slow)} M/s in place of {SPEED:g}")
        print(f"[positions] {' | '.join(rows[-1])}", flush=True)
    return rows, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradients", required=True, help="folder of benchmarks/capture.py")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of choosing.md")
    args = parser.parse_args()
    rows, missed = [HEAD], []
    for model in TARGETS:
        for suffix in ("", "-compensated"):
            found, more = measured(model + suffix, os.path.join(args.gradients, f"{model}{suffix}.npy"), args.repetitions)
            rows += found
            missed += more
    verdict = "All are met." if not missed else "Missed:\n\n" + "\n".join(f"- {line}" for line in missed)
    text = f"""\
Written by `benchmarks/positions.py`; do not edit. Of captures of `benchmarks/capture.py`, with `topk:0.01/rice/qsgd:7` and a residual: lm
is an embedding and LSTM, transformer a small one under AdamW. Shares are of log2 C(d, k), which is what random positions need.

{as_markdown(rows)}

Targets: at 1 % of gradient + residual at most {", ".join(f"{most:g} ({model})" for model, most in TARGETS.items())}; nowhere above
{MOST:g} or above zlib; and {SPEED:g} million positions a second each way, by the shortest codec. {verdict}

Measured on {datetime.date.today()} on {machine()}, on one core.
"""
    print(write_section(args.out, "positions", "Positions", text, "choosing.md"))
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"[positions] error: {error}")

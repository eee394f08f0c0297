"""Sections of docs/benchmarks.md and of other pages, which each benchmark writes for itself, and the results they are made of."""

import argparse
import contextlib
import datetime
import glob
import json
import os
import subprocess
from collections.abc import Sequence

from _lib import ROOT, machine, replace_between

PAGE = "benchmarks.md"


def commit(checkout: str = ROOT) -> str:
    """Describe a checkout's commit, and whether files have changed since."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip()


def days(dates: Sequence[str]) -> str:
    """Say when something was measured. dates: of the results, as YYYY-MM-DD, in any order."""
    first, last = min(dates), max(dates)
    return f"on {first}" if first == last else f"from {first} to {last}"


def part_of(path: str) -> str:
    """Name what a worker writes, of which `keep` makes the result. So a run that ends between the two is made again."""
    return f"{path}.part"


def read_part(path: str) -> dict:
    """Read what a worker has written of a result."""
    with open(part_of(path)) as file:
        return json.load(file)


def keep(found: dict, path: str) -> None:
    """Write a result, with the date, the commit and the machine, in the place of its part."""
    found |= {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine()}
    with open(path, "w") as file:
        json.dump(found, file, indent=1)
        file.write("\n")
    with contextlib.suppress(FileNotFoundError):
        os.remove(part_of(path))


def path_of(folder: str, name: str, seed: int | str) -> str:
    """Name the result of a run with a seed."""
    return os.path.join(folder, f"{name}-{seed}.json")


def by_seed(folder: str, name: str) -> dict[int, dict]:
    """Read the results of a run, by seed."""
    found = {}
    for path in glob.glob(path_of(folder, name, "[0-9]*")):
        with open(path, encoding="utf-8") as file:
            found[int(path.rpartition("-")[2].removesuffix(".json"))] = json.load(file)
    return dict(sorted(found.items()))


def results_parser(doc: str, data: str, page: str, results: str) -> argparse.ArgumentParser:
    """Make the parser of a benchmark that keeps its results and writes a section of a page. data: what the folder is."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--data", help=f"{data}; needed without --page")
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the section from the results")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help=f"folder of {page}")
    parser.add_argument("--results", default=results, help="folder of the results")
    return parser


def parse_results(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments of results_parser, and make the folder of the results."""
    args = parser.parse_args()
    args.results = os.path.abspath(args.results)
    if not args.page:
        if args.data is None:
            parser.error("--data is needed without --page")
        args.data = os.path.abspath(args.data)
        os.makedirs(args.results, exist_ok=True)
    return args


def write_section(folder: str, name: str, title: str, text: str, page: str = PAGE) -> str:
    """Replace the text between the markers of section `name`, or append the section to the page. Returns the path."""
    path = os.path.join(folder, page)
    markers = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write("# Benchmarks\n")
    with open(path, encoding="utf-8") as file:
        begun = markers[0] in file.read()
    if not begun:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"\n## {title}\n\n{markers[0]}\n{markers[1]}\n")
    replace_between(path, markers, text)
    return path

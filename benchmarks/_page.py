"""Sections of docs/benchmarks.md and of other pages, which each benchmark writes for itself, and the results they are made of."""

import datetime
import json
import os
import subprocess

from _lib import ROOT, machine, replace_between

PAGE = "benchmarks.md"


def commit(checkout: str = ROOT) -> str:
    """Describe a checkout's commit, and whether files have changed since."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip()


def keep(found: dict, path: str) -> None:
    """Write a result, with the date, the commit and the machine."""
    found |= {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine()}
    with open(path, "w") as file:
        json.dump(found, file, indent=1)
        file.write("\n")


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

"""What the benchmarks share: paths, and what they take from the examples. Only this module imports the examples' helpers."""

import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXAMPLES = os.path.join(ROOT, "examples")
sys.path.insert(0, EXAMPLES)

from _comparison import as_markdown, machine, make_training_parser, replace_between, size, training_options  # noqa: E402
from _launch import SHARED_CORES, Run, RunFailed, finish, horovodrun, train  # noqa: E402
from compare_tensorflow import FASHION, TEXT, tensorflow_machine  # noqa: E402

__all__ = [
    "EXAMPLES",
    "FASHION",
    "ROOT",
    "Run",
    "RunFailed",
    "SHARED_CORES",
    "TEXT",
    "as_markdown",
    "finish",
    "horovodrun",
    "launch",
    "machine",
    "make_training_parser",
    "replace_between",
    "size",
    "tensorflow_machine",
    "train",
    "training_options",
    "write_whole",
]


def write_whole(found: dict, path: str) -> None:
    """Write a worker's result, so that nobody finds a part of it."""
    with open(f"{path}.new", "w") as file:
        json.dump(found, file)
    os.replace(f"{path}.new", path)


def launch(
    label: str, script: str, options: list[str], ranks: int, timeout: float, env: dict[str, str] | None = None
) -> None:
    """Run a script under horovodrun, and show its progress on this terminal. Raises RunFailed.

    env: variables to set in addition to those of this process.
    """
    finish(label, [*horovodrun(ranks), script, *options], timeout, env)

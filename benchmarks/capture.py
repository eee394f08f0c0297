"""Capture real gradients of three models, for `python -m grace_ext bench --input FILE`, and print the files' names.

    python benchmarks/capture.py [--out DIR]

A convolutional network on Fashion-MNIST (2.7 million parameters), an embedding + LSTM language model (26.2 million) and the
transformer of benchmarks/transformer.py (1.3 million, under AdamW) train for some steps on 2 ranks. cnn.npy, lm.npy and
transformer.npy hold rank 0's own gradient of the last step; cnn-compensated.npy and so on hold the same with the residual of error
feedback. They are written to DIR, which is $GRACE_EXT_GRADIENTS or gradients in the user's cache folder by default; existing files
are replaced.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable

import numpy as np
from _lib import EXAMPLES, ROOT, RunFailed, launch
from _transformer_job import job

from grace_ext import ConfigError, bench

sys.path.insert(0, os.path.join(ROOT, "mpirun"))

import fetch_fashion_mnist  # noqa: E402

#: Takes a folder for what is captured, and gives the script and its arguments.
Run = Callable[[str], tuple[str, list[str]]]
RANKS, SECONDS = 2, 600
CNN_STEPS, LM_STEPS, TRANSFORMER_STEPS = 60, 90, 200


def default_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("GRACE_EXT_GRADIENTS") or os.path.join(cache, "grace_ext", "gradients")


def example(name: str, steps: int, *options: str) -> Run:
    """A run of an example, which has options to capture gradients."""
    return lambda work: (os.path.join(EXAMPLES, name), [*options, "--capture", work, "--capture-steps", str(steps - 1)])


def transformer(steps: int) -> Run:
    def run(work: str) -> tuple[str, list[str]]:
        how = "grace_ext", {"compression": "topk:0.01/rice/qsgd:7", "memory": "residual"}
        captured = work, [steps - 1]
        script, options = job("gpt", *how, work, os.path.join(work, "result.json"), steps=steps, capture=captured)
        return script, [json.dumps(options)]

    return run


def runs(data: str) -> dict[str, tuple[int, Run]]:
    """Return name -> steps, run."""
    cnn = ["--data", data, "--model", "cnn", "--epochs", "1", "--train-samples", str(64 * RANKS * CNN_STEPS)]
    return {
        "cnn": (CNN_STEPS, example("pytorch_fashion_mnist.py", CNN_STEPS, *cnn)),
        "lm": (LM_STEPS, example("pytorch_text.py", LM_STEPS, "--steps", str(LM_STEPS), "--batch-size", "8")),
        "transformer": (TRANSFORMER_STEPS, transformer(TRANSFORMER_STEPS)),
    }


def capture(name: str, steps: int, run: Run, out: str) -> list[str]:
    """Make one run and save its last step's gradients; return the files."""
    with tempfile.TemporaryDirectory() as work:
        launch(name, *run(work), RANKS, SECONDS)
        return [
            save(bench.load(os.path.join(work, f"{steps - 1}{suffix}.npz")), os.path.join(out, f"{name}{suffix}.npy"))
            for suffix in ("", "-compensated")
        ]


def save(gradient: np.ndarray, path: str) -> str:
    """Save a gradient, replacing the file as a whole, so that two runs may do so at once."""
    part = f"{path}.{os.getpid()}"
    with open(part, "wb") as file:
        np.save(file, gradient)
    os.replace(part, path)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=default_folder(), help="default: %(default)s")
    out = parser.parse_args().out
    os.makedirs(out, exist_ok=True)
    try:
        data = fetch_fashion_mnist.fetch(fetch_fashion_mnist.default_folder())
        for name, (steps, run) in runs(data).items():
            print(*capture(name, steps, run, out), sep="\n", flush=True)
    except (RunFailed, RuntimeError, ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

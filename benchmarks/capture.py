"""Capture real gradients of two examples, for `python -m grace_ext bench --input FILE`, and print the files' names.

    python benchmarks/capture.py [--out DIR]

A convolutional network on Fashion-MNIST (2.7 million parameters) and an embedding + LSTM language model (26.2 million) train
for a few dozen steps on 2 ranks. cnn.npy and lm.npy hold rank 0's own gradient of the last step; cnn-compensated.npy and
lm-compensated.npy hold the same with the residual of error feedback. They are written to DIR, which is $GRACE_EXT_GRADIENTS
or gradients in the user's cache folder by default; existing files are replaced.
"""

import argparse
import os
import sys
import tempfile

import numpy as np
from _lib import EXAMPLES, ROOT, RunFailed, launch

from grace_ext import ConfigError, bench

sys.path.insert(0, os.path.join(ROOT, "mpirun"))

import fetch_fashion_mnist  # noqa: E402

RANKS, SECONDS = 2, 600
CNN_STEPS, LM_STEPS = 60, 90


def default_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("GRACE_EXT_GRADIENTS") or os.path.join(cache, "grace_ext", "gradients")


def runs(data: str) -> dict[str, tuple[str, int, list[str]]]:
    """Return name -> example, steps, options."""
    cnn = ["--data", data, "--model", "cnn", "--epochs", "1", "--train-samples", str(64 * RANKS * CNN_STEPS)]
    return {
        "cnn": ("pytorch_fashion_mnist.py", CNN_STEPS, cnn),
        "lm": ("pytorch_text.py", LM_STEPS, ["--steps", str(LM_STEPS), "--batch-size", "8"]),
    }


def capture(name: str, example: str, steps: int, options: list[str], out: str) -> list[str]:
    """Run one example and save its last step's gradients; return the files."""
    with tempfile.TemporaryDirectory() as work:
        launch(
            name,
            os.path.join(EXAMPLES, example),
            [*options, "--capture", work, "--capture-steps", str(steps - 1)],
            RANKS,
            SECONDS,
        )
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
        for name, (example, steps, options) in runs(data).items():
            print(*capture(name, example, steps, options, out), sep="\n", flush=True)
    except (RunFailed, RuntimeError, ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

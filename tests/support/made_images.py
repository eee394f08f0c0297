"""A data set in the files of Fashion-MNIST that a small model learns in seconds."""

import gzip
from pathlib import Path

import numpy as np

CLASSES = 4


def write_patterns(folder: Path, train: int, test: int = 200) -> Path:
    """Write so many images of noisy patterns, one pattern for each of CLASSES; returns the folder."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 200, (CLASSES, 28, 28))
    for part, count in (("train", train), ("t10k", test)):
        labels = random.integers(0, CLASSES, count)
        images = patterns[labels] + random.integers(0, 56, (count, 28, 28))
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes()
            with gzip.open(folder / f"{part}-{name}-ubyte.gz", "wb") as file:
                file.write(head + array.astype(np.uint8).tobytes())
    return folder

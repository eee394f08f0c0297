"""Files of Fashion-MNIST, as arrays of NumPy."""

import gzip
import os

import numpy as np


def read_idx(folder, name):
    """Read a file of the data set, NAME or NAME.gz, as an array uint8[n, ...]."""
    path = os.path.join(folder, name)
    opener, path = (open, path) if os.path.exists(path) else (gzip.open, path + ".gz")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no {path}; fetch it with: python mpirun/fetch_fashion_mnist.py {folder}")
    content = opener(path, "rb").read()
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, "u1", offset=4 + 4 * len(shape)).reshape(shape)

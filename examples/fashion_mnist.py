"""Fashion-MNIST as tensors, for the PyTorch examples."""

import _idx
import torch
from torch import nn


def read_idx(folder, name):
    """Read a file of the data set, NAME or NAME.gz, as a tensor uint8[n, ...]."""
    return torch.from_numpy(_idx.read_idx(folder, name).copy())


def scaled(images):
    """Convert uint8[n, 28, 28] to float32[n, 1, 28, 28] with mean 0 and variance 1 over the training set."""
    return ((images.float() / 255 - 0.286) / 0.353).unsqueeze(1)


def load(folder, part):
    """Load images, float32[n, 1, 28, 28], and labels, int64[n]. part: "train" or "t10k"."""
    return scaled(read_idx(folder, f"{part}-images-idx3-ubyte")), read_idx(folder, f"{part}-labels-idx1-ubyte").long()


def small():
    """Make a network of 1.2 million parameters, nearly all of them in the first fully connected layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 48, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )

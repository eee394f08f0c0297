"""A module that computes a part of itself twice."""

import torch
from torch.utils.checkpoint import checkpoint


class Recomputing(torch.nn.Module):
    """A Sequential that keeps no activations of its first layers, and computes them once more in backward."""

    def __init__(self, layers: torch.nn.Sequential, first: int):
        super().__init__()
        self.layers, self.first = layers, first

    def forward(self, x):
        return self.layers[self.first :](checkpoint(self.layers[: self.first], x, use_reentrant=False))

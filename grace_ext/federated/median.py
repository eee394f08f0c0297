"""The coordinate-wise median.

Yin, Chen, Kannan and Bartlett, Byzantine-robust distributed learning: towards optimal statistical rates, ICML 2018,
Definition 1 and Algorithm 1, option I.
"""

import numpy as np

from .mean import CoordinateMean


class Median(CoordinateMean):
    """Of each element, the value in the middle, or the mean of the two in the middle. It stays within what honest clients
    sent as long as fewer than half lie."""

    def of_sorted(self, block: np.ndarray) -> np.ndarray:
        clients = len(block)
        low, high = block[(clients - 1) // 2], block[clients // 2]
        return low / np.float32(2) + high / np.float32(2)

"""The coordinate-wise median.

Yin, Chen, Kannan and Bartlett, Byzantine-robust distributed learning: towards optimal statistical rates, ICML 2018,
Definition 1 and Algorithm 1, option I.
"""

import numpy as np

from .base import CoordinateMean


class Median(CoordinateMean):
    """The median of each element: the middle value, or the mean of the two middle ones.

    It stays within the range of what honest clients sent as long as fewer than half of the clients are Byzantine.
    """

    def of_sorted(self, block: np.ndarray) -> np.ndarray:
        clients = len(block)
        low, high = block[(clients - 1) // 2], block[clients // 2]
        return low / np.float32(2) + high / np.float32(2)

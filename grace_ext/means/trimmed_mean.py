"""The coordinate-wise trimmed mean.

Yin, Chen, Kannan and Bartlett, Byzantine-robust distributed learning: towards optimal statistical rates, ICML 2018,
Definition 2 and Algorithm 1, option II.
"""

import numpy as np

from .base import CoordinateMean, byzantine_count, check_share


class TrimmedMean(CoordinateMean):
    """The mean of each element without its largest and its smallest values.

    Args:
        share: The share of clients whose values are left out at each end, at least that of the clients that may be
            Byzantine, from 0 to below 1/2; rounded up to whole clients as long as one is left.

    Raises:
        ConfigError: The share is out of range.
    """

    def __init__(self, share: float):
        check_share("TrimmedMean", share)
        self.share = share

    def of_sorted(self, block: np.ndarray) -> np.ndarray:
        cut = byzantine_count(self.share, len(block))
        return block[cut : len(block) - cut].mean(axis=0, dtype=np.float32)

"""The coordinate-wise trimmed mean.

Yin, Chen, Kannan and Bartlett, Byzantine-robust distributed learning: towards optimal statistical rates, ICML 2018,
Definition 2 and Algorithm 1, option II.
"""

import numpy as np

from .mean import CoordinateMean, check_share, most_liars


class TrimmedMean(CoordinateMean):
    """Of each element, the mean of what is left without the largest and the smallest values.

    share: of the clients whose values are left out at each end, at least as many as may lie; rounded up to whole clients as
    long as one is left. Raises ConfigError unless it is from 0 to below 1/2.
    """

    def __init__(self, share: float):
        check_share("TrimmedMean", share)
        self.share = share

    def of_sorted(self, block: np.ndarray) -> np.ndarray:
        cut = most_liars(self.share, len(block))
        return block[cut : len(block) - cut].mean(axis=0, dtype=np.float32)

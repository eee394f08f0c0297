"""The statistics of a support by which `auto` compares codecs: exact sizes, and lower bounds where these are slow."""

import numpy as np

from ..kernels.gap_huffman import CONTEXTS, ROW, count_gaps


class GapCounts:
    """How often each class of gaps occurs in a support.

    Attributes:
        indices: uint32[k].
        d: Number of elements of the domain.
        counts: int64[CONTEXTS * ROW]; the count of class c after context x is at x * ROW + c (docs/container-format.md,
            "Gap classes").
        classes: int64[ROW], the counts summed over all contexts.
        payload: The section of the codec that has to encode a support to know its size, uint8[m]; None before it has.

    Args:
        indices: uint32[k], strictly ascending, below d, k >= 1.
        d: Number of elements of the domain.
    """

    def __init__(self, indices: np.ndarray, d: int):
        self.indices, self.d = indices, d
        self.payload: np.ndarray | None = None
        self.counts, self.classes = np.empty(CONTEXTS * ROW, np.int64), np.empty(ROW, np.int64)
        count_gaps(indices, self.counts, self.classes)

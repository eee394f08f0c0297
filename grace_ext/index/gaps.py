"""What `auto` learns from one pass over a support."""

import numpy as np

from ..kernels.gap_huffman import CONTEXTS, ROW, count_gaps


class Gaps:
    """How often each class of gaps occurs in a support.

    indices: uint32[k], strictly ascending, below d, k >= 1. counts: int64[CONTEXTS * ROW], class c after context x at
    x * ROW + c (docs/container-format.md, "Gap classes"); classes: int64[ROW], the same over all contexts.
    """

    def __init__(self, indices: np.ndarray, d: int):
        self.indices, self.d = indices, d
        self.counts = np.empty(CONTEXTS * ROW, np.int64)
        count_gaps(indices, self.counts)
        self.classes = self.counts.reshape(CONTEXTS, ROW).sum(axis=0)

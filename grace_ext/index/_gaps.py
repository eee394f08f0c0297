"""The statistics of a support by which `auto` compares codecs: exact sizes, and lower bounds where these are slow."""

import numpy as np

from ..kernels.gap_huffman import CONTEXTS, ROW, survey_gaps

_COUNTS = CONTEXTS * ROW


class GapCounts:
    """How often each class of gaps occurs in a support.

    Attributes:
        indices: uint32[k].
        d: Number of elements of the domain.
        counts: int64[CONTEXTS * ROW]; the count of class c after context x is at x * ROW + c (docs/container-format.md,
            "Gap classes").
        classes: int64[ROW], the counts summed over all contexts.
        plan: (rows, classes, bits) of the shortest Huffman codes of the classes, as plan_gap_codes returns them.
        lengths: uint8[CONTEXTS * ROW], the lengths of these codes.
        run_bits: A lower bound of the bits that the runs of zeros need; see least_run_bits.
        payload: The section of the codec that has to encode a support to know its size, uint8[m]; None before it has.

    Args:
        indices: uint32[k], strictly ascending, below d, k >= 1.
        d: Number of elements of the domain.
    """

    def __init__(self, indices: np.ndarray, d: int):
        self.indices, self.d = indices, d
        self.payload: np.ndarray | None = None
        counts, self.lengths = np.empty(_COUNTS + ROW, np.int64), np.empty(_COUNTS, np.uint8)
        *self.plan, self.run_bits = survey_gaps(indices, counts, self.lengths)
        self.counts, self.classes = counts[:_COUNTS], counts[_COUNTS:]

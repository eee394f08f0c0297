"""Sums of squares of a result's rows and columns, computed while the result is written."""

import numpy as np

from ..kernels.second_moment import square_sums


class SquareSums:
    """The sums of squares of each row and each column of the matrices that a vector consists of.

    Decoding a sum of containers writes the vector in tiles, which are in the caches then. A decoder that is given this computes
    the sums there, and spares a pass over the memory.

    Args:
        matrices: The rows and columns of each matrix, in the order in which the vector holds them, int64[m, 2].

    Attributes:
        shapes: The same.
        sums: The sums of squares, float32[n]: those of the first matrix's rows, then of its columns, and so on.
        written: Whether a decoder has written `sums`.
    """

    def __init__(self, matrices: np.ndarray):
        self.shapes = matrices
        self.sums = np.empty(int(self.shapes.sum()), np.float32)
        self.written = False

    def of(self, vector: np.ndarray) -> np.ndarray:
        """Return the sums, and compute them if no decoder has.

        Args:
            vector: float32[d], as it was written.

        Returns:
            `sums`.
        """
        if not self.written:
            at, start = 0, 0
            for rows, columns in self.shapes.tolist():
                middle, stop = at + rows, at + rows + columns
                square_sums(vector[start : start + rows * columns], self.sums[at:middle], self.sums[middle:stop])
                at, start = stop, start + rows * columns
            self.written = True
        return self.sums

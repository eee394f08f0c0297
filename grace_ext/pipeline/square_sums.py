"""Sums of squares of a result's rows and columns, computed while the result is written."""

from collections.abc import Sequence

import numpy as np

from ..kernels.second_moment import square_sums


class SquareSums:
    """The sums of squares of each row and each column of the matrices that a vector consists of.

    Decoding a sum of containers writes the vector in tiles, which are in the caches then. A decoder that is given this computes
    the sums there, and spares a pass over the memory.

    Args:
        matrices: The rows and columns of each matrix, in the order in which the vector holds them.

    Attributes:
        shapes: The same, int64[m, 2].
        sums: The sums of squares, float32[n]: those of the first matrix's rows, then of its columns, and so on.
        written: Whether a decoder has written `sums`.
    """

    def __init__(self, matrices: Sequence[tuple[int, int]]):
        self.shapes = np.array(matrices, np.int64).reshape(-1, 2)
        self.sums = np.empty(int(self.shapes.sum()), np.float32)
        self.written = False

    def of(self, vector: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the sums, and compute them if no decoder has.

        Args:
            vector: float32[d], as it was written.

        Returns:
            The sums of squares of rows and of columns of each matrix, float32[rows] and float32[columns].
        """
        found, at, start = [], 0, 0
        for rows, columns in self.shapes.tolist():
            by_row, by_column = self.sums[at : at + rows], self.sums[at + rows : at + rows + columns]
            if not self.written:
                square_sums(vector[start : start + rows * columns], by_row, by_column)
            found.append((by_row, by_column))
            at, start = at + rows + columns, start + rows * columns
        return found

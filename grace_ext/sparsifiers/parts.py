"""Gradients that do not lie in one array."""

from collections.abc import Iterable

import numpy as np

from ..kernels.second_moment import LANES, random_sketch


class SketchedParts(list[np.ndarray]):
    """The parts of a gradient, and a sketch of each, which whoever reads the gradient computes then, to spare a pass over it.

    Args:
        parts: Vectors float32 that together are the gradient.
        low: The key of the sketches' random numbers; see the kernel random_sketch.
        high: The other half of the key.

    Attributes:
        sketches: The sketches, float32[parts, 8].
        written: Whether they are there. Whoever changes the arrays that the parts lie in has to write them before.
    """

    def __init__(self, parts: Iterable[np.ndarray], low: np.uint32, high: np.uint32):
        super().__init__(parts)
        self.key = low, high
        self.sketches = np.empty((len(self), LANES), np.float32)
        self.written = False

    def sketch(self, i: int) -> None:
        """Write the sketch of one part.

        Args:
            i: The number of the part.
        """
        random_sketch(self[i], *self.key, self.sketches[i])

    def complete(self) -> np.ndarray:
        """Write the sketches if nobody has.

        Returns:
            All of them, float32[8 * parts].
        """
        if not self.written:
            for i in range(len(self)):
                self.sketch(i)
            self.written = True
        return self.sketches.reshape(-1)

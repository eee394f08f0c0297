"""What a transform promises."""

import numpy as np

from ..registry import Stage


class Transform(Stage):
    """Turns a gradient into coefficients in which fewer numbers say the same, chunk by chunk, and back.

    The gradient is padded with zeros to whole chunks. Containers carry `parameters()`; what receivers need is static and
    accepts any parameters: it raises ContainerError or works.
    """

    kind = "transform"
    #: Coefficients of one chunk: the length of the parts that a sparsifier may treat by themselves.
    chunk: int
    #: How many coefficients a gradient may have beyond its elements, with whatever parameters.
    most_padding: int

    def parameters(self) -> bytes:
        """What a receiver must know, at most 16 bytes."""
        raise NotImplementedError

    def forward(self, dense: np.ndarray, out: np.ndarray) -> None:
        """dense: float32[d], finite -> out: float32[domain(parameters, d)], finite."""
        raise NotImplementedError

    @staticmethod
    def domain(parameters: bytes, d: int) -> int:
        """How many coefficients a gradient of d elements has: d, filled up to whole chunks."""
        raise NotImplementedError

    @staticmethod
    def inverse(parameters: bytes, coefficients: np.ndarray) -> None:
        """coefficients: float32[domain(parameters, d)] -> the gradient, padded, in their place. The same bits on every
        machine."""
        raise NotImplementedError

"""The interface of transforms."""

import numpy as np

from .._util.scratch import scratch
from ..registry import Stage


class Transform(Stage):
    """Transforms each chunk so that few coefficients hold most of its energy, and inverts this.

    The gradient is padded with zeros to whole chunks. Containers carry `parameters()`. The static methods, which receivers
    use, accept any parameters: they work or raise ContainerError.
    """

    kind = "transform"
    #: Number of coefficients in a chunk: the length of the parts that a sparsifier may treat separately.
    chunk: int
    #: The most coefficients that a gradient may have beyond its elements, whatever the parameters.
    most_padding: int
    #: Whether `largest_of_chunks` is there: in one pass, the coefficients that are not selected are never written to memory.
    selects = False

    def parameters(self) -> bytes:
        """Return what a receiver needs to know.

        Returns:
            At most 16 bytes.
        """
        raise NotImplementedError

    def forward(self, dense: np.ndarray, out: np.ndarray) -> None:
        """Transform a gradient.

        Args:
            dense: float32[d], finite.
            out: Output, float32[domain(parameters, d)]: the coefficients, finite.
        """
        raise NotImplementedError

    def largest_of_chunks(
        self, gradient: np.ndarray, residual: np.ndarray | None, out: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Transform a gradient, and select the k coefficients of each chunk that have the largest magnitudes.

        Args:
            gradient: float32[d].
            residual: What is added to the gradient before, float32[d]; None for nothing.
            out: Output with a residual, float32[d]: gradient + residual.
            k: Number of coefficients to select of each chunk.

        Returns:
            The positions, uint32[n], strictly ascending, and the coefficients, float32[n], both in scratch arrays; None if an
            element of gradient + residual is not finite.
        """
        raise NotImplementedError

    def subtract(self, dense: np.ndarray, support: np.ndarray | None, values: np.ndarray, out: np.ndarray) -> None:
        """Subtract from a gradient what receivers compute from its coefficients. All machines get the same bits.

        Args:
            dense: The gradient, float32[d].
            support: The positions of the coefficients that are sent, uint32[k], strictly ascending; None for all.
            values: These coefficients as receivers decode them, float32[k].
            out: Output, float32[d]: the difference; may be `dense` itself.
        """
        restored = scratch("restored", np.float32, self.domain(self.parameters(), dense.size))
        restored[:] = 0
        restored[... if support is None else support] = values
        self.inverse(self.parameters(), restored)
        np.subtract(dense, restored[: dense.size], out=out)

    @staticmethod
    def domain(parameters: bytes, d: int) -> int:
        """Return how many coefficients a gradient has: d, filled up to whole chunks.

        Args:
            parameters: Those of the container, any bytes.
            d: Number of elements of the gradient.

        Returns:
            The number of coefficients.

        Raises:
            ContainerError: The parameters are not valid.
        """
        raise NotImplementedError

    @staticmethod
    def inverse(parameters: bytes, coefficients: np.ndarray) -> None:
        """Compute the gradient from its coefficients, in place. All machines get the same bits.

        Args:
            parameters: Those of the container, valid.
            coefficients: float32[domain(parameters, d)]; overwritten with the padded gradient.
        """
        raise NotImplementedError

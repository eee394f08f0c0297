"""What is computed with the matrices of a bucket and the factors of low-rank methods, where these lie."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..kernels import NON_FINITE, max_magnitude
from ..kernels.lowrank import add_magnitude, expand


class Matrices(Protocol):
    """A place where matrices lie. Adapters for accelerators have classes of their own.

    Factors that are the same on all ranks, and what ranks send, are numpy arrays; all else are arrays of the place, float32, which
    are sliced and reshaped as numpy's. What is not summed afterwards is computed in a fixed order.
    """

    def empty(self, size: int) -> Any:
        """Make an array.

        Args:
            size: Number of elements.

        Returns:
            An array of this place, float32[size].
        """

    def add(self, gradient: Any, residual: Any | None) -> bool:
        """Add the residual to a gradient.

        Args:
            gradient: float32[d], changed.
            residual: float32[d]; None for nothing.

        Returns:
            False if the sum is known to have elements that are not finite. If some are and it is not known, projections will
            have some.
        """
        raise NotImplementedError

    def to_host(self, message: Any) -> np.ndarray:
        """Give what this rank sends to the host.

        Args:
            message: An array of this place, float32[n].

        Returns:
            float32[n], which may change; on the host the message itself.
        """
        raise NotImplementedError

    def place(self, factor: np.ndarray) -> Any:
        """Bring a factor to this place.

        Args:
            factor: float32[r, n].

        Returns:
            An array of this place.
        """

    def project(self, matrix: Any, basis: Any, out: Any) -> None:
        """Compute M·Q.

        Args:
            matrix: M, float32[n, m].
            basis: Qᵀ, float32[r, m].
            out: Output, float32[n, r].
        """

    def project_back(self, pt: Any, matrix: Any, out: Any) -> None:
        """Compute Pᵀ·M.

        Args:
            pt: Pᵀ, float32[r, n].
            matrix: M, float32[n, m].
            out: Output, float32[r, m].
        """

    def expand(self, pt: Any, qt: Any, weight: np.float32, out: Any, own: Any, residual: Any) -> Any:
        """Compute out = weight * P·Qᵀ, and residual -= P·ownᵀ; elements of the residual that would not be finite become 0.

        Args:
            pt: Pᵀ, float32[r, n].
            qt: Qᵀ, float32[r, m].
            weight: The factor.
            out: Output, float32[n * m].
            own: This rank's part of Qᵀ, float32[r, m].
            residual: float32[n * m], changed; empty for none.

        Returns:
            What `all_finite` can tell of `out`.
        """

    def write(self, out: Any, values: np.ndarray) -> Any:
        """Write a tensor that was summed as it is.

        Args:
            out: Output, float32[n].
            values: float32[n].

        Returns:
            See `expand`.
        """

    def all_finite(self, found: Sequence[Any]) -> bool:
        """Say whether results are finite, the same on all ranks.

        Args:
            found: What `expand` and `write` have returned of them.

        Returns:
            The answer.
        """
        raise NotImplementedError


class HostMatrices(Matrices):
    """Matrices in numpy arrays."""

    @staticmethod
    def empty(size: int) -> np.ndarray:
        return np.empty(size, np.float32)

    @staticmethod
    def add(gradient: np.ndarray, residual: np.ndarray | None) -> bool:
        largest = max_magnitude(gradient) if residual is None else add_magnitude(gradient, residual)
        return bool(largest < NON_FINITE)

    @staticmethod
    def to_host(message: np.ndarray) -> np.ndarray:
        return message

    @staticmethod
    def place(factor: np.ndarray) -> np.ndarray:
        return factor

    @staticmethod
    def project(matrix: np.ndarray, basis: np.ndarray, out: np.ndarray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # all ranks find an Inf or NaN in the sum
            np.matmul(matrix, basis.T, out=out)

    @staticmethod
    def project_back(pt: np.ndarray, matrix: np.ndarray, out: np.ndarray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(pt, matrix, out=out)

    @staticmethod
    def expand(
        pt: np.ndarray, qt: np.ndarray, weight: np.float32, out: np.ndarray, own: np.ndarray, residual: np.ndarray
    ) -> int:
        return expand(pt, qt, weight, out, own, residual)

    @staticmethod
    def write(out: np.ndarray, values: np.ndarray) -> int:
        out[:] = values
        return max_magnitude(out)

    @staticmethod
    def all_finite(found: Sequence[int]) -> bool:
        return bool(max(found) < NON_FINITE)


#: Where gradients lie by default.
HOST = HostMatrices()

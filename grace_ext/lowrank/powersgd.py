"""Each matrix as the product of two thin factors that are summed by allreduce: one step of subspace iteration a step.

Vogels et al., PowerSGD: practical low-rank gradient compression for distributed optimization, NeurIPS 2019.

With M the sum of the ranks' matrices: P = M·Q, orthonormalized; Q = Mᵀ·P; the result is P·Qᵀ, and Q starts the next step.
Factors are kept by rows here, pt: float32[r, n] and qt: float32[r, m].
"""

import dataclasses
import math

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError
from ..kernels.lowrank import orthonormalize
from ..registry import Stage, register


@register
class PowerSGD(Stage):
    """A tensor is a matrix of its first dimension by the rest. It is sent as it is if factors would save less than
    min_rate times, and all tensors are in the first `start` steps. Always by allreduce; error feedback is the memory's.

    The names in torch's PowerSGDState: matrix_approximation_rank, min_compression_rate, start_powerSGD_iter, warm_start;
    use_error_feedback=False is memory="none", random_seed is the seed. An orthogonalization_epsilon is not needed: a
    column without a direction of its own is replaced by a random one.
    """

    kind = "lowrank"
    name = "powersgd"
    lossless = False
    stateful = True

    def __init__(self, rank: int = 4, min_rate: float = 2.0, start: int = 0, warm_start: bool = True):
        if not 1 <= rank <= 4096:
            raise ConfigError(f"powersgd: rank={rank}; allowed: 1 to 4096")
        if not 0 < min_rate < math.inf:
            raise ConfigError(f"powersgd: min_rate={min_rate}; allowed: finite and above 0")
        if start < 0:
            raise ConfigError(f"powersgd: start={start}; allowed: 0 and more")
        self.rank, self.min_rate, self.start, self.warm_start = rank, min_rate, start, warm_start

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(rows, columns, rank of the factors) of a tensor; rank 0: it is sent as it is."""
        if len(shape) < 2 or not all(shape):
            return 1, math.prod(shape), 0
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, self.rank)
        pays = (rows + columns) * rank * self.min_rate < rows * columns
        return rows, columns, rank if pays else 0

    def project(self, matrix: np.ndarray, qt: np.ndarray | None, stream: Stream, out: np.ndarray) -> None:
        """out = M·Q, float32[n, r], for M float32[n, m]. qt: the last step's, or None to start at random.

        stream: the same on all ranks.
        """
        basis = np.zeros((out.shape[1], matrix.shape[1]), np.float32) if qt is None else qt.copy()
        orthonormalize(basis, *stream.key())
        with np.errstate(over="ignore", invalid="ignore"):  # all ranks see it in the sum
            np.matmul(matrix, basis.T, out=out)

    def orthonormal(self, summed: np.ndarray, stream: Stream) -> np.ndarray:
        """pt: float32[r, n], orthonormal rows, of the finite sum float32[n, r]. The same bits on every machine."""
        pt = np.ascontiguousarray(summed.T)
        orthonormalize(pt, *dataclasses.replace(stream, name=stream.name + ".p").key())
        return pt

    def project_back(self, pt: np.ndarray, matrix: np.ndarray, out: np.ndarray) -> None:
        """out = Pᵀ·M, float32[r, m]."""
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(pt, matrix, out=out)

"""Low-rank method `powersgd`."""

import dataclasses
import math

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError
from ..kernels.lowrank import orthonormalize
from ..registry import Stage, register


@register
class PowerSGD(Stage):
    """Each matrix as the product of two thin factors, which an allreduce sums: subspace iterations, one in each step by default.

    With M the sum of the ranks' matrices, P = M·Q is orthonormalized, Q = Mᵀ·P, the result is P·Qᵀ, and Q starts the next
    step. With several iterations, P and Q are computed and summed as many times, from the Q before. The factors are kept by
    rows here, pt: float32[r, n] and qt: float32[r, m].

    A tensor is a matrix of its first dimension by all others. Error feedback is the memory's business. The names in torch's
    PowerSGDState are matrix_approximation_rank, min_compression_rate, start_powerSGD_iter and warm_start;
    use_error_feedback=False is memory="none", and random_seed is the seed. An orthogonalization_epsilon is not needed,
    because a column without a direction of its own is replaced by a random one.

    Args:
        rank: Most columns of a factor, 1 to 4096.
        min_rate: A tensor is sent as it is unless its factors have less than 1 / min_rate of its elements; above 0.
        start: Number of first steps in which all tensors are sent as they are.
        warm_start: Whether Q starts from the last step's; otherwise it is random in each step.
        iterations: Subspace iterations in each step, 1 to 16. Each costs two allreduces; with a warm start, one is as good as
            many in the long run.

    Source:
        Vogels et al., PowerSGD: practical low-rank gradient compression for distributed optimization, NeurIPS 2019; section 3
        and appendix for what a warm start makes of several iterations.
    """

    kind = "lowrank"
    name = "powersgd"
    lossless = False
    stateful = True

    def __init__(self, rank: int = 4, min_rate: float = 2.0, start: int = 0, warm_start: bool = True, iterations: int = 1):
        if not 1 <= rank <= 4096:
            raise ConfigError(f"powersgd: rank={rank}; allowed: 1 to 4096")
        if not 0 < min_rate < math.inf:
            raise ConfigError(f"powersgd: min_rate={min_rate}; allowed: finite and above 0")
        if start < 0:
            raise ConfigError(f"powersgd: start={start}; allowed: 0 and more")
        if not 1 <= iterations <= 16:
            raise ConfigError(f"powersgd: iterations={iterations}; allowed: 1 to 16")
        self.rank, self.min_rate, self.start, self.warm_start = rank, min_rate, start, warm_start
        self.iterations = iterations

    def factorization(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the matrix that a tensor becomes, and the rank of its factors.

        Args:
            shape: The tensor's shape.

        Returns:
            The number of rows, the number of columns, and the rank; rank 0 means that the tensor is sent as it is.
        """
        if len(shape) < 2 or not all(shape):
            return 1, math.prod(shape), 0
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, self.rank)
        pays = (rows + columns) * rank * self.min_rate < rows * columns
        return rows, columns, rank if pays else 0

    @staticmethod
    def rank_of_ratio(shape: tuple[int, ...], ratio: float) -> int:
        """Return the largest rank with which a tensor's factors have at most 1 / ratio of its elements.

        Args:
            shape: The tensor's shape: a matrix of n = its first dimension by m = all others.
            ratio: How many times fewer numbers the factors are to have, above 0 and finite.

        Returns:
            floor(n m / (ratio (n + m))), and at most n and m.

        Raises:
            ConfigError: The tensor has fewer than two dimensions or no elements, the ratio is out of range, or even factors of
                rank 1 have more elements.
        """
        if not 0 < ratio < math.inf:
            raise ConfigError(f"powersgd: ratio={ratio}; allowed: finite and above 0")
        if len(shape) < 2 or not all(shape):
            raise ConfigError(f"powersgd: a tensor of shape {shape} is sent as it is; factors need two dimensions")
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, int(rows * columns / (ratio * (rows + columns))))
        if rank < 1:
            raise ConfigError(
                f"powersgd: ratio={ratio} of shape {shape}; factors of rank 1 give {rows * columns / (rows + columns):.4g}"
            )
        return rank

    def basis(self, qt: np.ndarray | None, rank: int, columns: int, stream: Stream) -> np.ndarray:
        """Compute what a matrix is projected to. All machines get the same bits.

        Args:
            qt: The last step's Qᵀ, float32[r, m], or None to start at random.
            rank: r.
            columns: m.
            stream: Random numbers, the same on all ranks.

        Returns:
            Qᵀ with orthonormal rows, float32[r, m].
        """
        found = np.zeros((rank, columns), np.float32) if qt is None else qt.copy()
        orthonormalize(found, *stream.key())
        return found

    def orthonormalized(self, summed: np.ndarray, stream: Stream) -> np.ndarray:
        """Orthonormalize the sum of the ranks' P. All machines get the same bits.

        Args:
            summed: The sum, float32[n, r], finite.
            stream: Random numbers, the same on all ranks.

        Returns:
            Pᵀ with orthonormal rows, float32[r, n].
        """
        pt = np.ascontiguousarray(summed.T)
        orthonormalize(pt, *dataclasses.replace(stream, name=stream.name + ".p").key())
        return pt

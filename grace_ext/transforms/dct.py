"""Transform `dct`."""

import functools
import math

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.dct import forward, forward_largest, subtract_inverse, transform
from ..registry import register
from .base import Transform

_SIZES = tuple(1 << n for n in range(1, 9))
_NOTHING = np.empty(0, np.float32)
LARGEST = np.float32(2.0**100)  #: The largest magnitude that is transformed.


@functools.lru_cache
def factors(n: int) -> np.ndarray:
    """Return the factors for the kernel.

    The mathematics libraries of two machines differ far less than rounding to 32 bits hides (a test measures the margin), so
    all machines compute the same factors.

    Args:
        n: Number of elements that are transformed together, a power of two.

    Returns:
        float32[n].
    """
    found = np.empty(n, np.float32)
    found[0] = 1 / math.sqrt(n)
    for half in (1 << e for e in range(n.bit_length() - 1)):
        found[half : 2 * half] = [1 / (2 * math.cos(math.pi * (2 * i + 1) / (4 * half))) for i in range(half)]
    return found


@register
class DCT(Transform):
    """Chunked orthonormal DCT-II: what varies smoothly within a chunk is concentrated in few coefficients.

    A square (dims=2) is size * size consecutive elements of the flattened gradient, transformed along both axes. Magnitudes
    beyond 2**100 are cut to it; error feedback sends the rest later. Containers hold the exponent of size, and dims
    (docs/container-format.md, "Transforms").

    Args:
        size: A power of two from 2 to 256.
        dims: 1 for chunks of `size` elements, 2 for squares of size x size.

    Source:
        Panthalia's gradient compression, which follows Peng, Quesnelle and Kingma, Decoupled momentum optimization, 2024:
        chunks of the flattened gradient, the largest coefficients of each, 8 bits for each coefficient, and error feedback.
    """

    name, id = "dct", 1
    most_padding = max(_SIZES) ** 2 - 1
    selects = True
    sweep = {"dims": (1, 2)}

    def __init__(self, size: int = 64, dims: int = 2):
        if size not in _SIZES:
            raise ConfigError(f"dct: size={size}; allowed: {', '.join(map(str, _SIZES))}")
        if dims not in (1, 2):
            raise ConfigError(f"dct: dims={dims}; allowed: 1, 2")
        self.size = size
        self.dims = dims

    @property
    def chunk(self) -> int:  # type: ignore[override]
        """Number of elements in a chunk: size ** dims."""
        return self.size**self.dims

    def parameters(self) -> bytes:
        return bytes((self.size.bit_length() - 1, self.dims))

    def forward(self, dense: np.ndarray, out: np.ndarray) -> None:
        forward(dense, self.dims, LARGEST, factors(self.size), out.reshape(-1, self.size))

    def largest_of_chunks(
        self, gradient: np.ndarray, residual: np.ndarray | None, out: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        room = -(-gradient.size // self.chunk) * k
        positions, found = scratch("dct positions", np.uint32, room), scratch("dct values", np.float32, room)
        fused = residual is not None
        given = (gradient, residual, out) if fused else (gradient, gradient, _NOTHING)
        n = forward_largest(*given, fused, self.size, self.dims, LARGEST, factors(self.size), k, positions, found)
        return (positions[:n], found[:n]) if n >= 0 else None

    def subtract(self, dense: np.ndarray, support: np.ndarray | None, values: np.ndarray, out: np.ndarray) -> None:
        if support is None:
            super().subtract(dense, support, values, out)
        else:
            subtract_inverse(dense, self.size, self.dims, factors(self.size), support, values, out)

    @staticmethod
    def domain(parameters: bytes, d: int) -> int:
        if len(parameters) != 2 or not 1 <= parameters[0] <= 8 or parameters[1] not in (1, 2):
            raise ContainerError("dct: the parameters are missing or out of range")
        chunk = 1 << parameters[0] * parameters[1]
        return -(-d // chunk) * chunk

    @staticmethod
    def inverse(parameters: bytes, coefficients: np.ndarray) -> None:
        size = 1 << parameters[0]
        transform(coefficients.reshape(-1, size), parameters[1], True, factors(size))

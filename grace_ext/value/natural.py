"""Value codec `natural`."""

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.natural import natural_decode, natural_encode, nonzero_range
from ..registry import register
from ._levels import check_entropy, pack_levels, unpack_levels
from .base import ValueCodec

LAST = 254  # the largest biased exponent of a finite float32


@register
class Natural(ValueCodec):
    """Natural compression: stochastic rounding to a power of two. Unbiased, with a variance of at most 1/8 of the square.

    The paper takes 9 bits, a float's sign and exponent. This codec takes as many exponents as the values span, from the
    largest one on; a value below the smallest exponent becomes that or 0, which is unbiased as well. The payload holds the
    range of exponents and the levels (docs/container-format.md, "Value sections").

    Args:
        bits: Most bits for each value, 2 to 8: up to 2**(bits-1) - 1 powers of two, both signs and 0.
        entropy: The lossless code of the levels: none, huffman or ans.

    Source:
        Horvath, Ho, Horvath, Sahu, Canini and Richtarik, Natural Compression for Distributed Deep Learning, arXiv
        1905.10988, 2019.
    """

    name, id = "natural", 9
    sweep = {"bits": (3, 4, 5), "entropy": ("none", "ans")}

    def __init__(self, bits: int = 5, entropy: str = "none"):
        if not 2 <= bits <= 8:
            raise ConfigError(f"natural: bits={bits}; allowed: 2 to 8")
        self.bits = bits
        self.entropy = check_entropy("natural", entropy)

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        smallest, largest = map(int, nonzero_range(values))
        top = min(LAST, (largest + 0x7FFFFF) >> 23)  # rounded up; 2**128 would be Inf
        lowest = max(1, smallest >> 23, top - 2 ** (self.bits - 1) + 2)
        count = top - lowest + 1
        levels = scratch("value levels", np.uint8, values.size)
        natural_encode(values, *map(np.uint32, (lowest, count, *stream.key())), levels)
        head = np.array([lowest, count], np.uint8)
        return np.concatenate([head, pack_levels(levels, 2 * count + 1, self.entropy)]), None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        if payload.size < 2 or payload[0] == 0 or payload[1] > 127 or int(payload[0]) + int(payload[1]) > LAST + 1:
            raise ContainerError("natural: the exponents are missing or out of range")
        lowest, count = map(int, payload[:2])
        levels = scratch("value levels", np.uint8, out.size)
        unpack_levels(payload[2:], 2 * count + 1, levels)
        natural_decode(levels, np.uint32(lowest), np.uint32(count), out)

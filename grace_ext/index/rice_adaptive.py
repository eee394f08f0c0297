"""Index codec `rice_adaptive`."""

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels import pack_bits, unpack_bits
from ..kernels._helpers import MAX_SHIFT
from ..kernels.rice_blocks import block_shifts, rice_blocks_decode, rice_blocks_encode
from ..registry import register
from .base import IndexCodec

_SMALLEST, _LARGEST = 16, 4096
_WIDTH = 5  # bits of a parameter


@register
class RiceAdaptive(IndexCodec):
    """Rice codes with a parameter for each block of gaps, so that they follow a density that varies over the tensor.

    The payload holds the size of the blocks, their parameters, and the two streams of `rice` (docs/container-format.md,
    "Index sections").

    Args:
        block: Number of gaps that share a parameter, a power of two from 16 to 4096.

    Source:
        Rice and Plaunt, Some practical universal noiseless coding techniques, 1971, who also choose among codes for each
        block.
    """

    name, id = "rice_adaptive", 6

    def __init__(self, block: int = 128):
        if not _SMALLEST <= block <= _LARGEST or block & (block - 1):
            raise ConfigError(f"rice_adaptive: block={block}; allowed: powers of two from {_SMALLEST} to {_LARGEST}")
        self.block = block

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        shifts, shift_bytes, remainder_bytes, quotient_bytes = self._plan(indices)
        split = 1 + shift_bytes + remainder_bytes
        end = split + quotient_bytes
        payload = np.empty(end + 8, np.uint8)
        payload[0] = self.block.bit_length() - 1
        pack_bits(shifts, _WIDTH, payload[1:])
        quotients = scratch("quotients", np.uint8, quotient_bytes + 8)
        rice_blocks_encode(indices, self.block, shifts, payload[1 + shift_bytes :], quotients)
        payload[split:end] = quotients[:quotient_bytes]
        return payload[:end], indices

    def size(self, indices: np.ndarray, d: int) -> int:
        return 1 + sum(self._plan(indices)[1:])

    def _plan(self, indices: np.ndarray) -> tuple[np.ndarray, int, int, int]:
        """Return (parameter of each block, bytes of the parameters, of the remainders and of the quotients)."""
        shifts = np.empty(-(-indices.size // self.block), np.uint32)
        remainder_bits, quotient_bits = block_shifts(indices, self.block, shifts)
        return shifts, (_WIDTH * shifts.size + 7) // 8, (remainder_bits + 7) // 8, (quotient_bits + 7) // 8

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        k = out.size
        if not payload.size or not _SMALLEST <= 1 << min(int(payload[0]), 31) <= _LARGEST:
            raise ContainerError("rice_adaptive: the size of the blocks is missing or out of range")
        block = 1 << int(payload[0])
        blocks = -(-k // block)
        split = 1 + (_WIDTH * blocks + 7) // 8
        if split > payload.size:
            raise ContainerError(f"rice_adaptive: {payload.size} bytes are too few for {blocks} blocks")
        shifts = np.empty(blocks, np.uint32)
        unpack_bits(payload[1:split], _WIDTH, shifts)
        bits = block * int(shifts[:-1].sum()) + (k - block * (blocks - 1)) * int(shifts[-1])
        parameters, remainders, quotients = np.split(payload[1:], np.cumsum([split - 1, (bits + 7) // 8]))
        read = rice_blocks_decode(remainders, quotients, block, shifts, d, out) if shifts.max() <= MAX_SHIFT else -1
        if (
            read < 0
            or (read + 7) // 8 != quotients.size
            or _spare_bits(parameters, _WIDTH * blocks)
            or _spare_bits(remainders, bits)
        ):
            raise ContainerError(f"rice_adaptive: the codes are not {k} positions below {d}")


def _spare_bits(stream: np.ndarray, bits: int) -> int:
    """Return the bits behind the first `bits` ones in the last byte of uint8[m]."""
    return int(stream[-1]) >> bits % 8 if bits % 8 else 0

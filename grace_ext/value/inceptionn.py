"""Value codec `inceptionn`."""

import math

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..registry import register
from ._levels import pack_levels, unpack_levels
from .base import ValueCodec

_DROPPED, _BYTE, _HALF, _WHOLE = range(4)
_BIAS = 127  # of a float32's exponent


@register
class Inceptionn(ValueCodec):
    """INCEPTIONN: 0, 8, 16 or 32 bits for each value, by its exponent, as GRACE has it.

    Values from 1 on keep 32 bits, and values whose exponent is below that of the bound become 0. Of the exponents between,
    the upper half is sent as a sign and 14 bits of fraction, and the lower half as a sign and 6 bits, both truncated. A
    fraction that is truncated to 0 stands for half of the smallest one. The exponent of the bound is GRACE's,
    floor(log10(error_bound / 2)) toward 0: 2**-9 for 2e-10. The result is biased. The payload holds two bits for each value,
    and then the values of 32, 16 and 8 bits (docs/container-format.md, "Value sections").

    Args:
        error_bound: Sets the exponent below which values are dropped; above 0 and at most 2.

    Source:
        Li, Park, Alian et al., A network-centric hardware/algorithm co-design to accelerate distributed training of deep neural
        networks, MICRO 2018, section IV; Xu et al., GRACE, ICDCS 2021, for the bound and the fixed-point formats.
    """

    name, id = "inceptionn", 17

    def __init__(self, error_bound: float = 2e-10):
        if not 0 < error_bound <= 2:
            raise ConfigError(f"inceptionn: error_bound={error_bound}; allowed: above 0 and at most 2")
        self.error_bound = error_bound
        #: The smallest exponents, biased, of values that are sent in 8 and in 16 bits.
        self._lowest = max(1, _BIAS + int(math.log10(error_bound / 2)))
        self._middle = self._lowest + math.ceil((_BIAS - self._lowest) / 2)

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        exponents = values.view(np.uint32) >> 23 & 0xFF
        tags = scratch("value levels", np.uint8, values.size)
        tags[:] = np.searchsorted([self._lowest, self._middle, _BIAS], exponents, side="right")
        packed = [_fixed(values[tags == _HALF], np.uint16), _fixed(values[tags == _BYTE], np.uint8)]
        whole = values[tags == _WHOLE].astype("<f4", copy=False).view(np.uint8)
        return np.concatenate([pack_levels(tags, 4, "none"), whole, *(part.view(np.uint8) for part in packed)]), None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        tags = scratch("value levels", np.uint8, out.size)
        head = 1 + -(-out.size // 4)
        unpack_levels(payload[:head], 4, tags)
        sizes = [width * int(np.count_nonzero(tags == tag)) for tag, width in ((_WHOLE, 4), (_HALF, 2), (_BYTE, 1))]
        if payload.size != head + sum(sizes):
            raise ContainerError(f"inceptionn: {payload.size} bytes are not {out.size} values")
        whole, half, byte = np.split(payload[head:], np.cumsum(sizes)[:2])
        exact = np.frombuffer(whole.tobytes(), "<f4")
        if not np.isfinite(exact).all():
            raise ContainerError("inceptionn: a value is not finite")
        out[:] = 0
        out[tags == _WHOLE] = exact
        out[tags == _HALF] = _fraction(np.frombuffer(half.tobytes(), "<u2"))
        out[tags == _BYTE] = _fraction(byte)


def _fixed(values: np.ndarray, dtype: type) -> np.ndarray:
    """Return float32[n] below 1 as signs and truncated fractions: uint8[n], or little-endian uint16[n]."""
    bits = np.dtype(dtype).itemsize * 8
    fractions = (np.abs(values) * np.float32(2 ** (bits - 2))).astype(dtype)
    return (fractions | (np.signbit(values).astype(dtype) << dtype(bits - 1))).astype(np.dtype(dtype).newbyteorder("<"))


def _fraction(fixed: np.ndarray) -> np.ndarray:
    """The inverse of _fixed: float32[n] of uint8[n] or uint16[n], any bits."""
    bits = fixed.dtype.itemsize * 8
    fractions = (fixed & (2 ** (bits - 1) - 1)).astype(np.float32)
    fractions[fractions == 0] = 0.5
    return np.where(fixed >> (bits - 1), -fractions, fractions) * np.float32(2.0 ** (2 - bits))

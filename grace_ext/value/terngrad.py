"""Value codec `terngrad`."""

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.ternary import pack_fives, ternary_decode, ternary_stochastic, unpack_fives
from ..registry import register
from ._buckets import check_bucket, from_byte, read_floats, to_byte
from ._levels import pack_levels, unpack_levels
from .base import ValueCodec

_ENTROPY = {"bits": "none", "huffman": "huffman", "ans": "ans"}
_FIVES, _LEVELS = 0, 1


@register
class TernGrad(ValueCodec):
    """TernGrad: each value becomes 0 or plus or minus the largest magnitude, at random so that it is unbiased.

    The paper's gradient clipping, which would make it biased, is left out. The payload holds the scales and the ternary
    digits (docs/container-format.md, "Value sections" and "Digits").

    Args:
        packing: How the digits are packed: trits (five in a byte), bits (two bits for each value), huffman or ans.
        bucket: Number of values that share a scale, a power of two from 8 to 32768, or 0 for all values.

    Source:
        Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS 2017.
    """

    name, id = "terngrad", 7
    sweep = {"packing": ("trits", "ans")}

    def __init__(self, packing: str = "trits", bucket: int = 0):
        if packing not in ("trits", *_ENTROPY):
            raise ConfigError(f"terngrad: packing={packing}; allowed: trits, {', '.join(_ENTROPY)}")
        self.packing = packing
        self.bucket = check_bucket("terngrad", bucket)

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        k = values.size
        bucket = self.bucket or k
        norms = np.empty(-(-k // bucket), np.float32)
        digits = scratch("value levels", np.uint8, k)
        ternary_stochastic(values, bucket, *map(np.uint32, stream.key()), norms, digits)
        if self.packing == "trits":
            packed = np.empty(-(-k // 5), np.uint8)
            pack_fives(digits, packed)
        else:
            packed = pack_levels(digits, 3, _ENTROPY[self.packing])
        head = np.array([to_byte(self.bucket), _FIVES if self.packing == "trits" else _LEVELS], np.uint8)
        return np.concatenate([head, norms.astype("<f4", copy=False).view(np.uint8), packed]), None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        if payload.size < 2 or payload[1] > _LEVELS:
            raise ContainerError("terngrad: the parameters are missing or out of range")
        k = out.size
        bucket = from_byte("terngrad", payload[0], k)
        norms = read_floats("terngrad", payload[2:], -(-k // bucket))
        if (norms < 0).any():
            raise ContainerError("terngrad: a scale is negative")
        body = payload[2 + 4 * norms.size :]
        if payload[1] == _LEVELS:
            digits = scratch("value levels", np.uint8, k)
            unpack_levels(body, 3, digits)
        else:
            digits = read_fives("terngrad", body, k)
        ternary_decode(digits, bucket, norms, out)


def read_fives(name: str, packed: np.ndarray, k: int) -> np.ndarray:
    """Unpack ternary digits that are packed five in a byte.

    Args:
        name: Name of the codec, for messages.
        packed: uint8[ceil(k / 5)].
        k: Number of digits.

    Returns:
        The digits, 0 to 2, uint8[k or more] in a scratch array.

    Raises:
        ContainerError: `packed` has another length or is not that of k digits.
    """
    digits = scratch("value levels", np.uint8, 5 * -(-k // 5) + 3)
    if packed.size != -(-k // 5) or not unpack_fives(packed, k, digits):
        raise ContainerError(f"{name}: the section does not hold {k} ternary digits")
    return digits

"""QSGD: stochastic uniform quantization, unbiased, in buckets.

Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017, section 3. The
norm of a bucket is its 2-norm as there or, as in section 4, its largest magnitude: that has a smaller error at equal
bits, but with an entropy code, which takes the place of their Elias code, the 2-norm needs fewer bits at equal error.
"""

import numpy as np

from ..errors import ConfigError, ContainerError
from ..kernels import qsgd_decode, qsgd_encode
from ..registry import register
from ..scratch import scratch
from ._levels import check_entropy, pack_levels, unpack_levels
from .base import ValueCodec

MIN_BITS, MAX_BITS, MAX_LEVELS = 2, 8, 127
NORMS = ("max", "l2")
# The second byte: the bucket's logarithm, and what is not as in the simplest form.
_BUCKET, _TWO_NORM, _CODED, _COUNTED = 0x0F, 0x10, 0x20, 0x40


@register
class QSGD(ValueCodec):
    """bits: 2 to 8 a value, sign included, so 2**(bits-1) - 1 levels. bucket: values that share a norm, 8 to 32768.

    levels: 1 to 127 levels on each side of zero, instead of bits; 0 leaves it to bits. norm: max or l2, what the highest
    level stands for. entropy: none, huffman or ans, a lossless code of the levels.
    """

    name, id = "qsgd", 3
    sweep = {"bits": (2, 3, 4, 5, 6, 7, 8), "entropy": ("none", "ans")}

    def __init__(self, bits: int = 8, bucket: int = 512, levels: int = 0, norm: str = "max", entropy: str = "none"):
        if not MIN_BITS <= bits <= MAX_BITS:
            raise ConfigError(f"qsgd: bits={bits}; allowed: {MIN_BITS} to {MAX_BITS}")
        if bucket not in (1 << n for n in range(3, 16)):
            raise ConfigError(f"qsgd: bucket={bucket}; allowed: a power of two from 8 to 32768")
        if not 0 <= levels <= MAX_LEVELS:
            raise ConfigError(f"qsgd: levels={levels}; allowed: 1 to {MAX_LEVELS}, or 0: as bits says")
        if norm not in NORMS:
            raise ConfigError(f"qsgd: norm={norm}; allowed: {', '.join(NORMS)}")
        self.bits = bits
        self.bucket = bucket
        self.levels = levels
        self.norm = norm
        self.entropy = check_entropy("qsgd", entropy)

    def encode(self, values, stream):
        k, levels = values.size, self.levels or _levels_of(self.bits)
        bits = (2 * levels).bit_length()
        coded, counted = self.entropy != "none", levels != _levels_of(bits)
        width = 8 if coded else bits
        norms = np.empty(-(-k // self.bucket), np.float32)
        packed = scratch("qsgd_codes", np.uint8, k + 8) if coded else np.empty(k * width // 8 + 8, np.uint8)
        qsgd_encode(values, levels, width, self.bucket, self.norm == "l2", *map(np.uint32, stream.key()), norms, packed)
        payload = pack_levels(packed[:k], 2 * levels + 1, self.entropy) if coded else packed[:-(-k * width // 8)]
        flags = (self.norm == "l2") * _TWO_NORM + coded * _CODED + counted * _COUNTED
        head = np.array([bits, self.bucket.bit_length() - 1 + flags] + [levels] * counted, np.uint8)
        return np.concatenate([head, norms.astype("<f4").view(np.uint8), payload]), None

    @staticmethod
    def decode(payload, out):
        levels, bucket, coded, start = _parameters(payload)
        k, bits = out.size, (2 * levels).bit_length()
        end = start + 4 * -(-k // bucket)
        if payload.size <= end or not coded and payload.size != end + -(-k * bits // 8):
            raise ContainerError(f"qsgd: {payload.size} bytes do not fit {k} values of {bits} bits")
        norms = np.frombuffer(payload[start:end], "<f4").astype(np.float32)
        if not (np.isfinite(norms) & (norms >= 0)).all():
            raise ContainerError("qsgd: a norm is negative or not finite")
        if coded:
            codes = scratch("qsgd_codes", np.uint8, k)
            unpack_levels(payload[end:], 2 * levels + 1, codes)
            qsgd_decode(codes, levels, 8, bucket, norms, out)
        elif not qsgd_decode(payload[end:], levels, bits, bucket, norms, out) or int(payload[-1]) >> 8 - -k * bits % 8:
            raise ContainerError("qsgd: a code is out of range")


def _levels_of(bits: int) -> int:
    return (1 << bits - 1) - 1


def _parameters(payload) -> tuple[int, int, bool, int]:
    """(levels, bucket, whether the codes are coded, bytes used), checked; only one spelling of each is allowed."""
    bits, second = (int(payload[0]), int(payload[1])) if payload.size >= 3 else (0, 0)
    counted = bool(second & _COUNTED)
    levels = int(payload[2]) if counted else _levels_of(bits) if MIN_BITS <= bits <= MAX_BITS else 0
    if (not 1 <= levels <= MAX_LEVELS or (2 * levels).bit_length() != bits or counted and levels == _levels_of(bits)
            or not 3 <= second & _BUCKET <= 15 or second & 0x80):
        raise ContainerError("qsgd: the parameters are missing or out of range")
    return levels, 1 << (second & _BUCKET), bool(second & _CODED), 2 + counted

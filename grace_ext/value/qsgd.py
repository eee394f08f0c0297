"""Value codec `qsgd`."""

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels import pack_bits, qsgd_decode, qsgd_encode, unpack_bits
from ..kernels.qsgd import qsgd_decode_wide, qsgd_encode_wide
from ..registry import register
from ._buckets import SIZES, read_floats
from ._levels import check_entropy, pack_levels, unpack_levels
from .base import ValueCodec

MIN_BITS, MAX_BITS, MAX_LEVELS = 2, 8, 32767
_NARROW = 127  # up to so many levels, a code fits into a byte
_WIDTHS = range(2, 17)  # bits of a code
NORMS = ("max", "l2")
OUT_OF_RANGE = "qsgd: a code is out of range"
# The second byte: the logarithm of the bucket's size, and flags for whatever differs from the simplest form.
_BUCKET, _TWO_NORM, _CODED, _COUNTED = 0x0F, 0x10, 0x20, 0x40


@register
class QSGD(ValueCodec):
    """QSGD: stochastic uniform quantization in buckets, unbiased.

    The norm of a bucket is its 2-norm, as in section 3 of the paper, or its largest magnitude, as in section 4. The latter
    has a smaller error at equal bits; but with an entropy code, which takes the place of the paper's Elias code, the 2-norm
    needs fewer bits at equal error. The payload holds the norms and the levels (docs/container-format.md, "Value sections").

    Args:
        bits: Bits for each value, sign included, 2 to 8: 2**(bits-1) - 1 levels on each side of zero.
        bucket: Number of values that share a norm, a power of two from 8 to 32768.
        levels: Levels on each side of zero, 1 to 32767; 0: as `bits` says.
        norm: What the highest level stands for: max (the largest magnitude) or l2 (the 2-norm).
        entropy: The lossless code of the levels: none, huffman or ans. The latter two take up to 127 levels.

    Source:
        Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017, sections 3
        and 4.
    """

    name, id = "qsgd", 3
    sweep = {"bits": (2, 3, 4, 5, 6, 7, 8), "entropy": ("none", "ans")}

    def __init__(self, bits: int = 8, bucket: int = 512, levels: int = 0, norm: str = "max", entropy: str = "none"):
        if not MIN_BITS <= bits <= MAX_BITS:
            raise ConfigError(f"qsgd: bits={bits}; allowed: {MIN_BITS} to {MAX_BITS}")
        if bucket not in SIZES:
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
        if levels > _NARROW and entropy != "none":
            raise ConfigError(f"qsgd: entropy={entropy} with levels={levels}; allowed: up to {_NARROW} levels")

    @property
    def highest(self) -> int:
        """Levels on each side of zero, as `levels` or `bits` says."""
        return self.levels or _levels_of(self.bits)

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        k, levels = values.size, self.highest
        bits = (2 * levels).bit_length()
        coded = self.entropy != "none"
        width = 8 if coded else bits
        norms = np.empty(-(-k // self.bucket), np.float32)
        if levels > _NARROW:
            return self.section(norms, self._encode_wide(values, bits, norms, stream)), None
        packed = scratch("qsgd_codes", np.uint8, k + 8) if coded else np.empty(k * width // 8 + 8, np.uint8)
        qsgd_encode(values, levels, width, self.bucket, self.norm == "l2", *map(np.uint32, stream.key()), norms, packed)
        payload = pack_levels(packed[:k], 2 * levels + 1, self.entropy) if coded else packed[: -(-k * width // 8)]
        return self.section(norms, payload), None

    def _encode_wide(self, values: np.ndarray, bits: int, norms: np.ndarray, stream: Stream) -> np.ndarray:
        codes = scratch("qsgd_wide", np.uint32, values.size)
        qsgd_encode_wide(values, self.levels, self.bucket, self.norm == "l2", *map(np.uint32, stream.key()), norms, codes)
        packed = np.empty(-(-values.size * bits // 8), np.uint8)
        pack_bits(codes, bits, packed)
        return packed

    def section(self, norms: np.ndarray, packed: np.ndarray) -> np.ndarray:
        """Assemble the payload.

        Args:
            norms: The buckets' norms, float32[ceil(k / bucket)], written.
            packed: The levels as the entropy code or the fixed width gives them, uint8[m].

        Returns:
            The payload, uint8[m'].
        """
        levels = self.highest
        bits = (2 * levels).bit_length()
        counted = levels != _levels_of(bits)
        flags = (self.norm == "l2") * _TWO_NORM + (self.entropy != "none") * _CODED + counted * _COUNTED
        head = bytes((bits, self.bucket.bit_length() - 1 + flags))
        if counted:
            head += levels.to_bytes(1 if bits <= MAX_BITS else 2, "little")
        return np.concatenate([np.frombuffer(head, np.uint8), norms.astype("<f4").view(np.uint8), packed])

    @staticmethod
    def parts(payload: np.ndarray, k: int) -> tuple[int, int, bool, np.ndarray, np.ndarray]:
        """Take a payload apart, and check everything but the levels.

        Args:
            payload: uint8[m], any bytes.
            k: Number of values.

        Returns:
            The levels on each side of zero, the size of a bucket, whether the levels have an entropy code, the norms
            float32[buckets], and the levels as they are packed, uint8[m'].

        Raises:
            ContainerError: The payload is not that of k values.
        """
        levels, bucket, coded, start = _parameters(payload)
        bits = (2 * levels).bit_length()
        end = start + 4 * -(-k // bucket)
        if payload.size <= end or not coded and payload.size != end + -(-k * bits // 8):
            raise ContainerError(f"qsgd: {payload.size} bytes do not fit {k} values of {bits} bits")
        norms = read_floats("qsgd", payload[start:end], -(-k // bucket))
        if (norms < 0).any():
            raise ContainerError("qsgd: a norm is negative")
        if not coded and int(payload[-1]) >> 8 - -k * bits % 8:
            raise ContainerError(OUT_OF_RANGE)
        return levels, bucket, coded, norms, payload[end:]

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        k = out.size
        levels, bucket, coded, norms, packed = QSGD.parts(payload, k)
        bits = (2 * levels).bit_length()
        if levels > _NARROW:
            codes = scratch("qsgd_wide", np.uint32, k)
            unpack_bits(packed, bits, codes)
            fits = qsgd_decode_wide(codes, levels, bucket, norms, out)
        elif coded:
            codes = scratch("qsgd_codes", np.uint8, k)
            unpack_levels(packed, 2 * levels + 1, codes)
            fits = qsgd_decode(codes, levels, 8, bucket, norms, out)
        else:
            fits = qsgd_decode(packed, levels, bits, bucket, norms, out)
        if not fits:
            raise ContainerError(OUT_OF_RANGE)


def _levels_of(bits: int) -> int:
    return (1 << bits - 1) - 1


def _parameters(payload: np.ndarray) -> tuple[int, int, bool, int]:
    """Return (levels, bucket, whether codes are entropy-coded, bytes used), checked: only the canonical encoding is accepted."""
    bits, second = (int(payload[0]), int(payload[1])) if payload.size >= 4 else (0, 0)
    counted, coded = bool(second & _COUNTED), bool(second & _CODED)
    start = 2 + counted * (1 if bits <= MAX_BITS else 2)
    levels = int.from_bytes(payload[2:start].tobytes(), "little") if counted else _levels_of(bits) if bits in _WIDTHS else 0
    if (
        not 1 <= levels <= MAX_LEVELS
        or (2 * levels).bit_length() != bits
        or counted
        and levels == _levels_of(bits)
        or coded
        and levels > _NARROW
        or not 3 <= second & _BUCKET <= 15
        or second & 0x80
    ):
        raise ContainerError("qsgd: the parameters are missing or out of range")
    return levels, 1 << (second & _BUCKET), coded, start

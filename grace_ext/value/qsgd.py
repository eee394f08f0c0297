"""QSGD: stochastic uniform quantization, unbiased, in buckets.

Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017, section 3. The
norm of a bucket is its largest magnitude (section 4 there), whose error is smaller than the 2-norm's at equal bits.
"""

import math

import numpy as np

from ..errors import ConfigError, ContainerError
from ..kernels import qsgd_decode, qsgd_encode
from ..registry import register
from .base import ValueCodec

MIN_BITS, MAX_BITS = 2, 8


@register
class QSGD(ValueCodec):
    """bits: 2 to 8 a value, sign included, so 2**(bits-1) - 1 levels. bucket: values that share a norm, 8 to 32768."""

    name, id = "qsgd", 3

    def __init__(self, bits: int = 8, bucket: int = 512):
        if not MIN_BITS <= bits <= MAX_BITS:
            raise ConfigError(f"qsgd: bits={bits}; allowed: {MIN_BITS} to {MAX_BITS}")
        if bucket not in (1 << n for n in range(3, 16)):
            raise ConfigError(f"qsgd: bucket={bucket}; allowed: a power of two from 8 to 32768")
        self.bits = bits
        self.bucket = bucket

    def encode(self, values, stream):
        k = values.size
        norms = np.empty(-(-k // self.bucket), np.float32)
        packed = np.empty(k * self.bits // 8 + 16, np.uint8)
        qsgd_encode(values, self.bits, self.bucket, *map(np.uint32, stream.key()), norms, packed)
        head = np.array([self.bits, self.bucket.bit_length() - 1], np.uint8)
        return np.concatenate([head, norms.astype("<f4").view(np.uint8), packed[:-(-k * self.bits // 8)]]), None

    @staticmethod
    def decode(payload, out):
        if payload.size < 2 or not (MIN_BITS <= payload[0] <= MAX_BITS and 3 <= payload[1] <= 15):
            raise ContainerError("qsgd: the parameters are missing or out of range")
        bits, bucket, k = int(payload[0]), 1 << int(payload[1]), out.size
        count = -(-k // bucket)
        if payload.size != 2 + 4 * count + math.ceil(k * bits / 8):
            raise ContainerError(f"qsgd: {payload.size} bytes do not fit {k} values of {bits} bits")
        norms = np.frombuffer(payload[2:2 + 4 * count], "<f4").astype(np.float32)
        if not (np.isfinite(norms) & (norms >= 0)).all():
            raise ContainerError("qsgd: a norm is negative or not finite")
        spare_bits = -k * bits % 8
        if not qsgd_decode(payload[2 + 4 * count:], bits, bucket, norms, out) or int(payload[-1]) >> 8 - spare_bits:
            raise ContainerError("qsgd: a code is out of range")

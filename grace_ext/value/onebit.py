"""Value codec `onebit`."""

import numpy as np

from .._util.rng import Stream
from ..errors import ContainerError
from ..kernels.signs import onebit_decode, onebit_encode
from ..registry import register
from ._buckets import check_bucket, from_byte, read_floats, to_byte
from .base import ValueCodec


@register
class OneBit(ValueCodec):
    """One bit for each value: its sign. Receivers take the mean of the bucket's values of that sign.

    The result is biased, so it needs error feedback. The payload holds two means for each bucket, and k bits
    (docs/container-format.md, "Value sections").

    Args:
        bucket: Number of values that share two means, a power of two from 8 to 32768, or 0 for all values.

    Source:
        Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
        Training of Speech DNNs, Interspeech 2014, section 3.
    """

    name, id = "onebit", 8
    sweep = {"bucket": (64, 512, 4096)}

    def __init__(self, bucket: int = 512):
        self.bucket = check_bucket("onebit", bucket)

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        k = values.size
        bucket = self.bucket or k
        means = np.empty((-(-k // bucket), 2), np.float32)
        payload = np.empty(1 + 4 * means.size + -(-k // 8), np.uint8)
        onebit_encode(values, bucket, means, payload[1 + 4 * means.size :])
        payload[0] = to_byte(self.bucket)
        payload[1 : 1 + 4 * means.size] = means.astype("<f4", copy=False).reshape(-1).view(np.uint8)
        return payload, None

    @staticmethod
    def parts(payload: np.ndarray, k: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Take a payload apart, and check it.

        Args:
            payload: uint8[m], any bytes.
            k: Number of values.

        Returns:
            The size of a bucket, the means float32[buckets, 2], and the signs, uint8[ceil(k / 8)].

        Raises:
            ContainerError: The payload is not that of k values.
        """
        if not payload.size:
            raise ContainerError("onebit: the section is empty")
        bucket = from_byte("onebit", payload[0], k)
        count = -(-k // bucket)
        means = read_floats("onebit", payload[1:], 2 * count).reshape(count, 2)
        bits = payload[1 + 8 * count :]
        if bits.size != -(-k // 8) or int(bits[-1]) >> 8 - -k % 8:
            raise ContainerError(f"onebit: {payload.size} bytes are not {k} signs")
        return bucket, means, bits

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        bucket, means, bits = OneBit.parts(payload, out.size)
        onebit_decode(bits, bucket, means, out)

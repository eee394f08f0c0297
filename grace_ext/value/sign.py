"""Value codec `sign`."""

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError, ContainerError
from ..kernels.signs import onebit_decode, onebit_encode
from ..registry import register
from ._buckets import check_bucket, from_byte, read_floats, to_byte
from .base import ValueCodec

_SCALES = ("mean", "one")
_BARE = 1  # in the place of a bucket's size: no scales, each is 1


@register
class Sign(ValueCodec):
    """One bit for each value: its sign. A zero of either sign counts as positive.

    The result is biased. With the scale `mean` it is EF-SignSGD's compressor, which needs error feedback. With `one` it is
    signSGD's: receivers get 1 or -1, which communicator `majority` can put to the vote. The payload holds a scale for each
    bucket, and k bits (docs/container-format.md, "Value sections").

    Args:
        scale: What the signs are multiplied by: mean (the mean magnitude of the bucket's values) or one.
        bucket: Number of values that share a mean, a power of two from 8 to 32768, or 0 for all values. Only for `mean`.

    Source:
        Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD: compressed optimisation for non-convex problems, ICML 2018;
        Karimireddy, Rebjock, Stich and Jaggi, Error feedback fixes SignSGD and other gradient compression schemes, ICML 2019,
        Algorithm 1, for the scale.
    """

    name, id = "sign", 16
    sweep = {"bucket": (64, 512, 4096)}

    def __init__(self, scale: str = "mean", bucket: int = 512):
        if scale not in _SCALES:
            raise ConfigError(f"sign: scale={scale}; allowed: {', '.join(_SCALES)}")
        self.scale = scale
        self.bucket = check_bucket("sign", bucket)

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        k = values.size
        bucket = (self.bucket or k) if self.scale == "mean" else k
        means, bits = np.empty((-(-k // bucket), 2), np.float32), np.empty(-(-k // 8), np.uint8)
        onebit_encode(values, bucket, means, bits)
        return self.section(means, bits, k)[1], None

    def section(self, means: np.ndarray, bits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Make the section of what the kernel `onebit_encode` gives.

        Args:
            means: Of the values of each sign in each bucket, float32[buckets, 2].
            bits: The signs, uint8[ceil(k / 8)].
            k: Number of values.

        Returns:
            The scale of each bucket, float32[buckets], and the section, uint8[m].
        """
        if self.scale == "one":
            return np.ones(len(means), np.float32), np.concatenate([np.array([_BARE], np.uint8), bits])
        scales = _magnitudes(means, bits, self.bucket or k, k).astype("<f4", copy=False)
        return scales, np.concatenate([np.array([to_byte(self.bucket)], np.uint8), scales.view(np.uint8), bits])

    @staticmethod
    def parts(payload: np.ndarray, k: int) -> tuple[int, np.ndarray | None, np.ndarray]:
        """Read a section.

        Args:
            payload: The section, uint8[m].
            k: Number of values, at least 1.

        Returns:
            The number of values that share a scale; the scales, float32[n], or None where each is 1; and the signs,
            uint8[ceil(k / 8)].

        Raises:
            ContainerError: The section does not hold k signs.
        """
        if not payload.size:
            raise ContainerError("sign: the section is empty")
        bare = payload[0] == _BARE
        bucket = k if bare else from_byte("sign", payload[0], k)
        scales = None if bare else read_floats("sign", payload[1:], -(-k // bucket))
        if scales is not None and (scales < 0).any():
            raise ContainerError("sign: a scale is negative")
        bits = payload[1 if scales is None else 1 + 4 * scales.size :]
        if bits.size != -(-k // 8) or int(bits[-1]) >> 8 - -k % 8:
            raise ContainerError(f"sign: {payload.size} bytes are not {k} signs")
        return bucket, scales, bits

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        bucket, scales, bits = Sign.parts(payload, out.size)
        scales = np.ones(1, np.float32) if scales is None else scales
        onebit_decode(bits, bucket, np.stack([scales, -scales], axis=1), out)


def _magnitudes(means: np.ndarray, bits: np.ndarray, bucket: int, k: int) -> np.ndarray:
    """Return the mean magnitude of each bucket, float32[n], from the means of its signs, float32[n, 2], and k bits."""
    starts = np.arange(len(means)) * bucket
    negative = np.add.reduceat(np.unpackbits(bits, count=k, bitorder="little"), starts, dtype=np.int64)
    sizes = np.diff(starts, append=k)
    return ((means[:, 0] * (sizes - negative) - means[:, 1].astype(np.float64) * negative) / sizes).astype(np.float32)

"""Value codec `sketchml`."""

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.sketch import MOST_BINS, look_up, sketch_encode
from ..registry import register
from ._levels import check_entropy, pack_levels, unpack_levels
from .base import ValueCodec

FEWEST, MOST = 4, 256


@register
class SketchML(ValueCodec):
    """Quantile buckets: values fall into buckets of about equal count, and decode to the mean of their bucket.

    The quantiles come from a histogram instead of a streaming sketch, and a bucket never holds both signs, so no sign is
    reversed. With entropy codes for the bucket numbers, and beside an index codec, it is SKCompress. The payload holds the
    means and the bucket numbers (docs/container-format.md, "Value sections").

    Args:
        buckets: Most buckets, 4 to 256.
        entropy: The lossless code of the bucket numbers: none, huffman or ans. Because the counts are about equal, it gains
            little unless values repeat.

    Source:
        Jiang et al., SketchML: Accelerating Distributed Machine Learning with Data Sketches, SIGMOD 2018, section 3.2; Jiang
        et al., SKCompress, VLDB Journal 2020.
    """

    name, id = "sketchml", 12
    sweep = {"buckets": (8, 32, 64, 256)}

    def __init__(self, buckets: int = 64, entropy: str = "none"):
        if not FEWEST <= buckets <= MOST:
            raise ConfigError(f"sketchml: buckets={buckets}; allowed: {FEWEST} to {MOST}")
        self.buckets = buckets
        self.entropy = check_entropy("sketchml", entropy)

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        # With few values there are fewer bins, because passing over all bins would take longer than over the values.
        bins = min(MOST_BINS, max(1024, 1 << values.size.bit_length() >> 2))
        counts = scratch("sketch counts", np.uint32, 2 * MOST_BINS + 1)[: 2 * bins + 1]
        lookup = scratch("sketch lookup", np.uint8, 2 * MOST_BINS + 1)[: 2 * bins + 1]
        levels = scratch("value levels", np.uint8, values.size)
        means = np.empty(MOST, np.float32)
        used = sketch_encode(values, self.buckets, counts, lookup, levels, means)
        head = [np.array([used - 1], np.uint8), means[:used].astype("<f4").view(np.uint8)]
        return np.concatenate([*head, pack_levels(levels, used, self.entropy)]), None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        used = int(payload[0]) + 1 if payload.size else 0
        if not used or payload.size < 1 + 4 * used:
            raise ContainerError("sketchml: the table is missing")
        means = np.zeros(MOST, np.float32)
        means[:used] = payload[1 : 1 + 4 * used].view("<f4")
        if not np.isfinite(means).all():
            raise ContainerError("sketchml: a mean is not finite")
        levels = scratch("value levels", np.uint8, out.size)
        unpack_levels(payload[1 + 4 * used :], used, levels)
        look_up(levels, means, out)

"""What a value codec promises."""

import numpy as np

from .._util.rng import Stream
from ..registry import Stage


class ValueCodec(Stage):
    """Turns the values at the support into bytes and back.

    `encode` gets finite float32 values; a codec that sorts them returns the order as well (order[i] is the place in
    the support of the i-th decoded value) and the container stores it. `decode` must accept any bytes: it raises
    ContainerError or fills the array it is given, and never needs the options of the sender's codec.
    """

    kind = "value"
    lossless = False
    #: The dtype in which the values can be summed by an allreduce instead of being sent as a container, if any.
    reducible_dtype: str | None = None
    #: Treats what is sent of each of a transform's chunks by itself: `for_chunks` gives the codec that encodes.
    needs_chunks = False

    def for_chunks(self, count: int) -> "ValueCodec":
        """The same codec where each chunk has `count` of the values. Of codecs with needs_chunks only."""
        raise NotImplementedError

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        """values: float32[k], finite, k >= 1 -> (payload uint8[m], order uint32[k] or None)."""
        raise NotImplementedError

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        """payload: uint8[m] -> out: float32[k], k >= 1."""
        raise NotImplementedError

"""The interface of value codecs."""

import numpy as np

from .._util.rng import Stream
from ..registry import Stage


class ValueCodec(Stage):
    """Encodes the values at the support as bytes, and decodes them.

    `encode` gets finite float32 values. A codec that sorts them also returns the order (order[i] is the place in the support
    of the i-th decoded value), which the container stores. `decode` accepts any bytes: it fills the array that it is given
    or raises ContainerError, and it never needs the options of the sender's codec.
    """

    kind = "value"
    lossless = False
    #: The dtype in which an allreduce can sum the values, so that no container is needed; None if there is none.
    reducible_dtype: str | None = None
    #: Whether it treats the values of each chunk of a transform separately: `for_chunks` gives the codec that encodes.
    needs_chunks = False

    def for_chunks(self, count: int) -> "ValueCodec":
        """Return the codec that encodes where each chunk of a transform has `count` values. For codecs with needs_chunks.

        Args:
            count: Number of values that are sent of each chunk.

        Returns:
            A codec with the same options.
        """
        raise NotImplementedError

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        """Encode values.

        Args:
            values: float32[k], finite, k >= 1.
            stream: The random numbers of this gradient on this rank.

        Returns:
            The payload, uint8[m], and the place in the support of each decoded value, uint32[k], or None if they are in
            order.
        """
        raise NotImplementedError

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        """Decode values.

        Args:
            payload: uint8[m], any bytes.
            out: Output, float32[k], k >= 1.

        Raises:
            ContainerError: The payload is not that of k values.
        """
        raise NotImplementedError

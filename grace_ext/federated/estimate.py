"""A vector that one side tells another one by containers, so that both know the same estimate of it, bit for bit.

Richtárik, Sokolov and Fatkhullin, EF21: a new, simpler, theoretically better, and practically faster error feedback, NeurIPS
2021. The difference from what the other side knows is compressed, so that what one container leaves out is sent by later
ones.
"""

import numpy as np

from .._util.rng import Stream
from ..errors import ExchangeError
from ..pipeline.compressor import Compressor
from ..pipeline.decoder import decode_add


class Estimate:
    """What both sides know of a vector; it is kept in the attribute `known`, float32[d].

    Args:
        known: The initial estimate, float32[d], which is copied.
    """

    def __init__(self, known: np.ndarray):
        self.known = np.array(known, np.float32).reshape(-1)

    def encode_and_apply(self, vector: np.ndarray, compressor: Compressor, stream: Stream) -> np.ndarray:
        """Make the container that brings the estimate closer to a vector, and apply it.

        Args:
            vector: float32[d].
            compressor: Compresses the difference from the estimate.
            stream: Random numbers for the compressor.

        Returns:
            The container, uint8[m].

        Raises:
            ExchangeError: The difference is not finite. The estimate is unchanged then.
        """
        encoded = compressor.encode(vector - self.known, stream)
        if encoded.non_finite:
            raise ExchangeError("the vector that is to be told holds a NaN or an Inf")
        self.apply(encoded.blob)
        return encoded.blob.copy()

    def apply(self, blob: np.ndarray) -> None:
        """Add the container that the other side made.

        Args:
            blob: The container, uint8[m].

        Raises:
            ContainerError: The container is malformed. The estimate is unchanged then.
        """
        decode_add(blob, self.known)

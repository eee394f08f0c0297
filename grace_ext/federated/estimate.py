"""A vector that one side tells another by containers, so that both know the same of it, to the bit.

Richtárik, Sokolov and Fatkhullin, EF21: a new, simpler, theoretically better, and practically faster error feedback,
NeurIPS 2021: what is compressed is the difference from what the other side knows, so what a container leaves out comes
later.
"""

import numpy as np

from .._util.rng import Stream
from ..errors import ExchangeError
from ..pipeline.compressor import Compressor
from ..pipeline.decoder import decode_add


class Estimate:
    """known: float32[d], what both sides know; zeros at first, or a copy of what is given."""

    def __init__(self, size: int, known: np.ndarray | None = None):
        self.known = np.zeros(size, np.float32) if known is None else np.array(known, np.float32).reshape(-1)

    def tell(self, vector: np.ndarray, compressor: Compressor, stream: Stream) -> np.ndarray:
        """The container, uint8[m], that brings `known` closer to vector, float32[d]. Raises ExchangeError, and then knows
        what it knew, if the difference is not finite."""
        encoded = compressor.encode(vector - self.known, stream)
        if encoded.non_finite:
            raise ExchangeError("the vector that is to be told holds a NaN or an Inf")
        self.hear(encoded.blob)
        return encoded.blob.copy()

    def hear(self, blob: np.ndarray) -> None:
        """Raises ContainerError, and then knows what it knew."""
        decode_add(blob, self.known)

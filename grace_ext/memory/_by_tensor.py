"""What the memories have in common that make an optimizer's steps tensor by tensor."""

from collections.abc import Sequence

import numpy as np

from ..communicators.factors import ShapedTensor
from .residual import Residual

_LARGEST_FALL = 10.0  # of the learning rate, that residuals follow at once


class ResidualByTensor(Residual):
    """Memory "residual" that knows the tensors of its buckets.

    Args:
        decay: See Residual.
        bits: See Residual.
    """

    suits_sender_means = False  # steps made of what the ranks send have the size of its sum

    def __init__(self, decay: float = 1.0, bits: int = 32):
        super().__init__(decay, bits)
        self._tensors: dict[str, Sequence[ShapedTensor]] = {}  # by bucket
        self._places: dict[str, tuple[str, slice]] = {}  # by tensor: its bucket, and where in it

    def set_tensors(self, name: str, tensors: Sequence[ShapedTensor]) -> None:
        self._tensors[name] = tensors
        start = 0
        for tensor in tensors:
            self._places[tensor.name] = name, slice(start, start + tensor.size)
            start += tensor.size

    def _rescale(self, tensor: str, before: float, rate: float) -> None:
        """Let a tensor's residual, which is in units of a learning rate, stay the same step when the rate changes."""
        bucket, part = self._places[tensor]
        self._residual.scale(bucket, part, np.float32(min(before / rate, _LARGEST_FALL)))

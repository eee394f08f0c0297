"""The momentum of a rank's own gradients, which memories apply before compression."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..kernels.momentum import accumulate_momentum, accumulate_nesterov
from ..pipeline.compressor import Compressor
from .arrays import Arrays, NumpyArrays
from .base import Memory
from .states import States


class Velocity(Memory):
    """Each gradient is replaced by a velocity: u = momentum · u + share · g.

    By itself it is the memory of tensors that are sent exactly: then it is the optimizer's momentum, before the sum.

    Args:
        momentum: Factor of the velocity, from 0 to below 1.
        share: Factor of the gradient: 1, or 1 - momentum for a moving average.
        nesterov: Whether the momentum is Nesterov's, as in torch.optim.SGD.
        clip: Limit of the L2 norm of each tensor: this rank's gradient is cut to clip / sqrt(ranks); 0 for no limit.
    """

    name = "velocity"
    stateful = True
    has_hooks = True
    corrects_gradient = True
    applies_momentum = True

    def __init__(self, momentum: float, share: float = 1.0, nesterov: bool = False, clip: float = 0.0):
        self.momentum, self.share, self.nesterov, self.clip = momentum, share, nesterov, clip
        self._velocity = States("velocity")
        self.states = {"velocity": self._velocity}

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray, None]:
        velocity, following = self._velocity.begin(name, out.size)
        start = 0
        for gradient in parts:
            part = slice(start, start + gradient.size)
            kept = NumpyArrays.clipping(gradient, self._largest(ranks)) if self.clip else 1.0
            momentum, share = np.float32(self.momentum), np.float32(self.share * kept)
            if self.nesterov:
                accumulate_nesterov(velocity[part], gradient, momentum, share, following[part], out[part])
            else:
                accumulate_momentum(velocity[part], gradient, momentum, share, following[part])
            start += gradient.size
        return out if self.nesterov else following, None

    def works_at_positions(self, compressor: Compressor) -> bool:
        return True

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        velocity, following = self._velocity.begin(name, len(gradient), arrays)
        if self.clip:
            start = 0
            for size in sizes:
                part = gradient[start : start + size]
                part *= self.share * arrays.clipping(part, self._largest(ranks))
                start += size
        elif self.share != 1:
            gradient *= self.share
        following[:] = velocity
        if self.nesterov:
            following += gradient
            following *= self.momentum
            gradient += following
        else:
            following *= self.momentum
            following += gradient
            gradient[:] = following

    def _largest(self, ranks: int) -> float:
        """Return the largest norm that a rank's gradient may have."""
        return self.clip / math.sqrt(ranks)

    def begin_step(self, name: str, size: int, arrays: Arrays = NumpyArrays) -> tuple[Any, Any]:
        """Begin a step for what computes the next velocity itself.

        Args:
            name: Name of the bucket.
            size: Number of its elements.
            arrays: The kind of arrays that the velocity is kept in.

        Returns:
            The velocity and a buffer for the next one, both float32[size] of that kind.
        """
        return self._velocity.begin(name, size, arrays)

    def restart(self, name: str, support: Any) -> None:
        """Let the next velocity start from zero at some positions.

        Args:
            name: Name of the bucket.
            support: The positions, uint32[k], or int64[k] of the kind of arrays that the velocity is kept in.
        """
        self._velocity.upcoming(name)[support] = 0

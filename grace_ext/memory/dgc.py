"""Memory `dgc`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from ..communicators.base import Communicator, Pending
from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..registry import register
from .arrays import Arrays, NumpyArrays
from .base import Memory
from .residual import Residual
from .velocity import Velocity


@register
class DGC(Residual):
    """Momentum correction, local gradient clipping and momentum factor masking.

    With u the velocity and v the residual of a rank: u = m·u + g; v = v + u; the largest elements of v are sent; where
    something was sent, v keeps what was not, and u starts from zero. The optimizer must have no momentum of its own. Its
    weight decay acts outside the momentum: divide it by 1 - momentum for the same effect. The paper's warm-up of the density
    is a schedule (grace_ext.policy.schedules), and its sampled threshold is the sparsifier `dgc`.

    Args:
        momentum: Factor m of the velocity, from 0 to below 1.
        clip: Limit of the L2 norm of each tensor's mean gradient: each rank's is cut to clip / sqrt(ranks); 0 for no limit.
        masking: Whether the velocity starts from zero where something was sent.
        nesterov: Whether the momentum is Nesterov's, as in torch.optim.SGD.
        deviations: Limit of the elements of v, in standard deviations of the v of their tensor; 0 for no limit. What is cut off
            is lost. The paper does not have it; a survey clips at 2.5. Tensors that are sent exactly are not clipped.

    Source:
        Lin et al., Deep gradient compression, ICLR 2018, section 3.
    """

    name = "dgc"
    supports_rows = False
    has_hooks = True
    corrects_gradient = True
    applies_momentum = True

    def __init__(
        self, momentum: float = 0.9, clip: float = 0.0, masking: bool = True, nesterov: bool = False, deviations: float = 0.0
    ):
        if not 0 <= momentum < 1:
            raise ConfigError(f"dgc: momentum={momentum}; allowed: from 0 to below 1")
        if not 0 <= clip < math.inf:
            raise ConfigError(f"dgc: clip={clip}; allowed: finite and not negative, 0 for none")
        if not 0 <= deviations < math.inf:
            raise ConfigError(f"dgc: deviations={deviations}; allowed: finite and not negative, 0 for no limit")
        super().__init__()
        self.momentum, self.clip, self.masking, self.nesterov = momentum, clip, masking, nesterov
        self.deviations = deviations
        self._velocity = Velocity(momentum, nesterov=nesterov, clip=clip)
        self._exact = Velocity(momentum, nesterov=nesterov, clip=clip)
        self.states = {**self.states, **self._velocity.states}

    def check(self, compressor: Compressor, communicator: Communicator) -> None:
        super().check(compressor, communicator)
        if compressor.lowrank is not None or compressor.transform is not None:
            raise ConfigError(f"memory 'dgc' follows single elements; {str(compressor)!r} sends none: use residual")
        if self.masking and not communicator.reports_support:
            raise ConfigError(
                f"memory 'dgc' masks the momentum of what was sent, and by {communicator.name!r} a rank knows "
                f"that too late: use dgc:masking=false, or communicator allgather"
            )

    def for_compressor(self, compressor: Compressor) -> Memory:
        return self._exact if compressor.exact else self

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        raise ConfigError("memory 'dgc' needs to know what was sent: use it in an exchange, or memory 'residual'")

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray, None]:
        velocity, _ = self._velocity.correct_gradient(name, parts, out, ranks, stream, density)
        if self.deviations:
            if velocity is not out:
                np.copyto(out, velocity)
            self._clip(name, out, [part.size for part in parts], NumpyArrays)
            return out, None
        return velocity, None

    def works_at_positions(self, compressor: Compressor) -> bool:
        return True

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        self._velocity.correct_at(name, gradient, sizes, ranks, arrays)
        if self.deviations:
            self._clip(name, gradient, sizes, arrays)

    def _clip(self, name: str, velocity: Any, sizes: Sequence[int], arrays: Arrays) -> None:
        """Make of the velocity, an array of that kind, what has to be added to the residual for a sum that is clipped."""
        residual, start = self._residual.current(name), 0
        with non_finite_allowed():
            velocity += residual
            for size in sizes:
                arrays.clip(velocity[start : start + size], self.deviations)
                start += size
            velocity -= residual

    def on_sent(self, name: str, pending: Pending) -> None:
        if self.masking and pending.support is not None:
            self._velocity.restart(name, pending.support)

    def commit(self) -> None:
        super().commit()
        self._velocity.commit()

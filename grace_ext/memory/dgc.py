"""Momentum correction, local gradient clipping and momentum factor masking.

Lin et al., Deep gradient compression, ICLR 2018, section 3. The density's warm-up of that paper is a schedule
(grace_ext.policy.schedules), its sampled threshold the sparsifier `dgc`.

With u the velocity and v the residual of a rank: u = m·u + g; v = v + u; what is largest in v is sent; where something was
sent, v keeps what was not and u starts from zero.
"""

import math

import numpy as np

from ..errors import ConfigError
from ..kernels.momentum import accumulate_momentum, accumulate_nesterov
from ..registry import register
from .base import Memory
from .residual import Residual
from .states import States


class Momentum(Memory):
    """The momentum of each rank's own gradients, for tensors that are sent exactly: the optimizer's, before the sum.

    clip: the L2 norm that a tensor's gradient may have, over the square root of the number of ranks; 0: any.
    """

    name = "momentum"
    stateful = True
    has_hooks = True
    applies_momentum = True

    def __init__(self, momentum: float, nesterov: bool, clip: float):
        self.momentum, self.nesterov, self.clip = momentum, nesterov, clip
        self._velocity = States("velocity")
        self.states = {"velocity": self._velocity}

    def correct(self, name, gradient, sizes, ranks):
        velocity, following = self._velocity.begin(name, gradient.size)
        start = 0
        accumulate = accumulate_nesterov if self.nesterov else accumulate_momentum
        parts = sizes if self.clip else (gradient.size,)
        for size in parts:
            part = slice(start, start + size)
            share = clipping(gradient[part], self.clip / math.sqrt(ranks)) if self.clip else 1.0
            accumulate(velocity[part], gradient[part], np.float32(self.momentum), np.float32(share), following[part])
            start += size

    def restart(self, name: str, support: np.ndarray) -> None:
        """The next velocity is zero at support, uint32[k]."""
        self._velocity.following(name)[support] = 0


@register
class DGC(Residual):
    """The optimizer must have no momentum of its own. Its weight decay acts outside the momentum: divide by 1 - momentum
    for the same effect.

    momentum: from 0 to below 1. clip: as a threshold of the L2 norm of each tensor's gradient, averaged over ranks; 0: none.
    masking: whether the velocity of what was sent starts from zero. nesterov: as in torch.optim.SGD.
    """

    name = "dgc"
    by_rows = False
    has_hooks = True
    applies_momentum = True

    def __init__(self, momentum: float = 0.9, clip: float = 0.0, masking: bool = True, nesterov: bool = False):
        if not 0 <= momentum < 1:
            raise ConfigError(f"dgc: momentum={momentum}; allowed: from 0 to below 1")
        if not 0 <= clip < math.inf:
            raise ConfigError(f"dgc: clip={clip}; allowed: finite and not negative, 0 for none")
        super().__init__()
        self.momentum, self.clip, self.masking, self.nesterov = momentum, clip, masking, nesterov
        self._momentum = Momentum(momentum, nesterov, clip)
        self._exact = Momentum(momentum, nesterov, clip)
        self.states = {**self.states, **self._momentum.states}

    def check(self, compressor, communicator):
        super().check(compressor, communicator)
        if compressor.lowrank is not None or compressor.transform is not None:
            raise ConfigError(f"memory 'dgc' follows single elements; {str(compressor)!r} sends none: use residual")
        if self.masking and not communicator.tells_support:
            raise ConfigError(
                f"memory 'dgc' masks the momentum of what was sent, and by {communicator.name!r} a rank knows "
                f"that too late: use dgc:masking=false, or communicator allgather"
            )

    def exact(self):
        return self._exact

    def compensate(self, name, gradient):
        raise ConfigError("memory 'dgc' needs to know what was sent: use it in an exchange, or memory 'residual'")

    def correct(self, name, gradient, sizes, ranks):
        self._momentum.correct(name, gradient, sizes, ranks)

    def sent(self, name, pending):
        if self.masking and pending.support is not None:
            self._momentum.restart(name, pending.support)

    def commit(self):
        super().commit()
        self._momentum.commit()


def clipping(gradient: np.ndarray, largest: float) -> float:
    """What to multiply float32[n] with so that its L2 norm is at most `largest`."""
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(gradient))
    if math.isinf(norm):  # of the squares in float32, or of the gradient itself, which then becomes NaN
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
    return largest / norm if norm > largest else 1.0

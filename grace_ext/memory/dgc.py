"""Memory `dgc`."""

import math

import numpy as np

from ..communicators.base import Communicator, Pending
from ..errors import ConfigError
from ..kernels.momentum import accumulate_momentum, accumulate_nesterov
from ..pipeline.compressor import Compressor
from ..registry import register
from .base import Memory
from .residual import Residual
from .states import States


class Momentum(Memory):
    """The momentum of each rank's own gradients, for tensors that are sent exactly: the optimizer's, before the sum.

    Args:
        momentum: Factor of the velocity, from 0 to below 1.
        nesterov: Whether the momentum is Nesterov's, as in torch.optim.SGD.
        clip: Limit of the L2 norm of each tensor: this rank's gradient is cut to clip / sqrt(ranks); 0 for no limit.
    """

    name = "momentum"
    stateful = True
    has_hooks = True
    applies_momentum = True

    def __init__(self, momentum: float, nesterov: bool, clip: float):
        self.momentum, self.nesterov, self.clip = momentum, nesterov, clip
        self._velocity = States("velocity")
        self.states = {"velocity": self._velocity}

    def correct_gradient(self, name: str, gradient: np.ndarray, sizes: tuple[int, ...], ranks: int) -> None:
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
        """Let the next velocity start from zero at some positions.

        Args:
            name: Name of the bucket.
            support: The positions, uint32[k].
        """
        self._velocity.upcoming(name)[support] = 0


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

    Source:
        Lin et al., Deep gradient compression, ICLR 2018, section 3.
    """

    name = "dgc"
    supports_rows = False
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

    def check(self, compressor: Compressor, communicator: Communicator) -> None:
        super().check(compressor, communicator)
        if compressor.lowrank is not None or compressor.transform is not None:
            raise ConfigError(f"memory 'dgc' follows single elements; {str(compressor)!r} sends none: use residual")
        if self.masking and not communicator.reports_support:
            raise ConfigError(
                f"memory 'dgc' masks the momentum of what was sent, and by {communicator.name!r} a rank knows "
                f"that too late: use dgc:masking=false, or communicator allgather"
            )

    def for_exact_tensors(self) -> Memory:
        return self._exact

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        raise ConfigError("memory 'dgc' needs to know what was sent: use it in an exchange, or memory 'residual'")

    def correct_gradient(self, name: str, gradient: np.ndarray, sizes: tuple[int, ...], ranks: int) -> None:
        self._momentum.correct_gradient(name, gradient, sizes, ranks)

    def on_sent(self, name: str, pending: Pending) -> None:
        if self.masking and pending.support is not None:
            self._momentum.restart(name, pending.support)

    def commit(self) -> None:
        super().commit()
        self._momentum.commit()


def clipping(gradient: np.ndarray, largest: float) -> float:
    """Return the factor that limits the L2 norm of a gradient.

    Args:
        gradient: float32[n].
        largest: The largest L2 norm allowed.

    Returns:
        A factor of at most 1; 0 if the gradient holds an Inf.
    """
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(gradient))
    if math.isinf(norm):  # of the squares in float32, or of the gradient itself, which then becomes NaN
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
    return largest / norm if norm > largest else 1.0

"""The momentum of Adam, compressed with error feedback, once its variance is frozen.

Tang et al., 1-bit Adam: communication efficient large-scale training with Adam's convergence speed, ICML 2021, algorithm 1.
The optimizer that freezes the variance is the adapters' (OneBitAdam); it fills the momentum in and takes what is exchanged
as the new one.
"""

import numpy as np

from ..errors import ConfigError
from ..kernels.momentum import accumulate_momentum
from ..registry import register
from .base import Memory
from .residual import Residual
from .states import States


class SharedMomentum(Memory):
    """For tensors that are sent exactly. Ranks send beta * m + (1 - beta) * g, with the m that they have in common and their
    own g; the mean is the next m, and takes the place of the gradient."""

    name = "shared_momentum"
    stateful = True
    on_device = False

    def __init__(self, beta: float):
        self.beta = beta
        self._momentum = States("momentum")
        self.states = {"momentum": self._momentum}

    def correct(self, name, gradient, sizes, ranks):
        accumulate_momentum(self._momentum.get(name, gradient.size), gradient, np.float32(self.beta),
                            np.float32(1 - self.beta), gradient)

    def received(self, name, out, scale):
        _, following = self._momentum.begin(name, out.size)
        np.multiply(out, np.float32(1 / scale), out=following)


@register
class AdamMomentum(Residual):
    """beta: Adam's first one, from 0 to below 1."""

    name = "adam_momentum"
    by_rows = on_device = False

    def __init__(self, beta: float = 0.9):
        if not 0 <= beta < 1:
            raise ConfigError(f"adam_momentum: beta={beta}; allowed: from 0 to below 1")
        super().__init__()
        self.beta = beta
        self._shared, self._exact = SharedMomentum(beta), SharedMomentum(beta)
        self.states = {**self.states, **self._shared.states}

    def exact(self):
        return self._exact

    def compensate(self, name, gradient):
        raise ConfigError("memory 'adam_momentum' needs what all ranks sent: use it in an exchange, or memory 'residual'")

    def correct(self, name, gradient, sizes, ranks):
        self._shared.correct(name, gradient, sizes, ranks)

    def received(self, name, out, scale):
        self._shared.received(name, out, scale)

    def commit(self):
        super().commit()
        self._shared.commit()

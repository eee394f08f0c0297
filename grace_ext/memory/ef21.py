"""Ranks keep an estimate of their gradient and send only the compressed difference to it.

Richtárik, Sokolov and Fatkhullin, EF21: a new, simpler, theoretically better, and practically faster error feedback, NeurIPS
2021. With momentum: Fatkhullin, Tyurin and Richtárik, Momentum provably improves error feedback, NeurIPS 2023, which
stochastic gradients need: without it, a position keeps the noise of the one gradient that was last sent there.
"""

import numpy as np

from ..errors import ConfigError
from ..kernels.momentum import accumulate_momentum
from ..pipeline.decoder import decode_add
from ..registry import register
from .base import Memory
from .states import States


@register
class EF21(Memory):
    """momentum: how much of its moving average a rank's gradient is, from 0 (the gradient itself) to below 1.

    estimate: of this rank's gradient, as all receivers could know it; aggregate: the mean of all ranks' estimates, the same
    on all, which takes the place of the exchanged gradient.
    """

    name = "ef21"
    stateful = True
    has_hooks = True
    summed = frozenset()

    def __init__(self, momentum: float = 0.0):
        if not 0 <= momentum < 1:
            raise ConfigError(f"ef21: momentum={momentum}; allowed: from 0 to below 1")
        self.momentum = momentum
        self._estimate, self._aggregate, self._average = States("estimate"), States("aggregate"), States("average")
        self.states = {"estimate": self._estimate, "aggregate": self._aggregate}
        if momentum:
            self.states["average"] = self._average
        self._containers: dict[str, np.ndarray] = {}  # sent in this step, by name

    def check(self, compressor, communicator):
        super().check(compressor, communicator)
        if not communicator.sends_containers:
            raise ConfigError(
                f"memory 'ef21' adds up containers; {str(compressor)!r} by {communicator.name!r} sends none: "
                f"use communicator allgather, or memory 'residual'"
            )

    def correct(self, name, gradient, sizes, ranks):
        if self.momentum:
            average, following = self._average.begin(name, gradient.size)
            accumulate_momentum(average, gradient, np.float32(self.momentum), np.float32(1 - self.momentum), following)
        with np.errstate(over="ignore", invalid="ignore"):  # the container says so
            gradient -= self._estimate.get(name, gradient.size)

    def sent(self, name, pending):
        self._containers[name] = pending.container

    def received(self, name, out, scale):
        aggregate, following = self._aggregate.begin(name, out.size)
        np.multiply(out, np.float32(1 / scale), out=following)
        following += aggregate
        np.multiply(following, np.float32(scale), out=out)

    def commit(self):
        super().commit()
        for name, container in self._containers.items():
            decode_add(container, self._estimate.held(name), 1.0)
        self._containers.clear()

    def rollback(self):
        super().rollback()
        self._containers.clear()

    def redistribute(self, states, ranks):
        found = super().redistribute(states, ranks)
        if "estimate" in found:
            found["aggregate"] = found["estimate"].copy()  # the mean also where some of the old ranks are missing
        return found

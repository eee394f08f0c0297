"""Memory `ef21`."""

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
from .states import States
from .velocity import Velocity


@register
class EF21(Memory):
    """Ranks keep an estimate of their gradient and send only the compressed difference to it.

    It keeps the estimate of this rank's gradient, as receivers could know it, and the aggregate, the mean of all ranks'
    estimates, which is the same on all ranks and takes the place of the exchanged gradient. Stochastic gradients need
    momentum: without it, a position keeps the noise of the one gradient that was last sent there.

    Args:
        momentum: Factor of the moving average that takes the place of a rank's gradient, from 0 (the gradient itself) to
            below 1.

    Source:
        Richtárik, Sokolov and Fatkhullin, EF21: a new, simpler, theoretically better, and practically faster error feedback,
        NeurIPS 2021; with momentum: Fatkhullin, Tyurin and Richtárik, Momentum provably improves error feedback, NeurIPS
        2023.
    """

    name = "ef21"
    stateful = True
    has_hooks = True
    corrects_gradient = True
    sends_differences = True
    receives_anywhere = True
    summed_fields: frozenset[str] = frozenset()

    def __init__(self, momentum: float = 0.0):
        if not 0 <= momentum < 1:
            raise ConfigError(f"ef21: momentum={momentum}; allowed: from 0 to below 1")
        self.momentum = momentum
        self._estimate, self._aggregate = States("estimate"), States("aggregate")
        self._averaged = Velocity(momentum, 1 - momentum)
        self.states = {"estimate": self._estimate, "aggregate": self._aggregate}
        if momentum:
            self.states["average"] = self._averaged.states["velocity"]
        self._containers: dict[str, np.ndarray] = {}  # sent in this step, by name

    def check(self, compressor: Compressor, communicator: Communicator) -> None:
        super().check(compressor, communicator)
        if not communicator.sends_containers:
            raise ConfigError(
                f"memory 'ef21' adds up containers; {str(compressor)!r} by {communicator.name!r} sends none: "
                f"use communicator allgather, or memory 'residual'"
            )

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray, None]:
        if self.momentum:
            parts = [self._averaged.correct_gradient(name, parts, out, ranks, stream, density)[0]]
        estimate, start = self._estimate.get(name, out.size), 0
        with non_finite_allowed():
            for part in parts:
                at = slice(start, start + part.size)
                np.subtract(part, estimate[at], out=out[at])
                start += part.size
        return out, None

    def works_at_positions(self, compressor: Compressor) -> bool:
        return True

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        if self.momentum:
            self._averaged.correct_at(name, gradient, sizes, ranks, arrays)
        gradient -= self._estimate.get(name, len(gradient), arrays)

    def on_sent(self, name: str, pending: Pending) -> None:
        self._containers[name] = pending.container  # type: ignore[assignment]  # `check` lets only those in that have one

    def on_received(self, name: str, out: np.ndarray, scale: float) -> None:
        self.on_received_anywhere(name, out, scale, NumpyArrays)

    def on_received_anywhere(self, name: str, out: Any, scale: float, arrays: Arrays) -> None:
        aggregate, following = self._aggregate.begin(name, len(out), arrays)
        if scale != 1:
            out *= float(1 / scale)
        out += aggregate
        following[:] = out
        if scale != 1:
            out *= float(scale)

    def commit(self) -> None:
        super().commit()
        for name, container in self._containers.items():
            self._estimate.arrays_of(name).add_container(container, self._estimate.current(name))
        self._containers.clear()

    def rollback(self) -> None:
        super().rollback()
        self._containers.clear()

    def redistribute(self, states: list[dict[str, np.ndarray]], ranks: int) -> dict[str, np.ndarray]:
        found = super().redistribute(states, ranks)
        if "estimate" in found:
            found["aggregate"] = found["estimate"].copy()  # it has to be their mean, even if former ranks are missing
        return found

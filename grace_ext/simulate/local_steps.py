"""Local steps in virtual time: when workers compute, when fragments are exchanged, and who waits for whom.

Rounds and fragments are timed as grace_ext.rounds times them (Douillard et al., DiLoCo, arXiv 2311.08105, and Streaming DiLoCo,
arXiv 2501.18512). What an exchange costs is the cost model's, whose bytes go over links that change. Nothing is trained here.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from ..policy.cost_model import Codec, Collective, Link, bytes_of, ring_allgather, step_of
from ..rounds.header import HEADER
from ..rounds.timing import check_timing, first_exchange
from ..rounds.weights import UNIFORM
from .traces import Trace


@dataclasses.dataclass(frozen=True)
class LocalSetting:
    """A training with local steps, but for what is sent and by which communicator.

    Attributes:
        params: Number of float32 elements of the model.
        links: The link of each worker, which carries as much in each direction at the same time; at least two.
        compute: Seconds of a local step, on average.
        total: Number of local steps of each worker.
        steps: Number of local steps between two exchanges of a fragment.
        fragments: Number of fragments, all of the same size.
        delay: Number of local steps that hide an exchange; see grace_ext.rounds.Rounds.
        latency: Seconds of a message, from 0 on.
        spread: Workers take another time for each step: standard deviation of the logarithm of its factor, from 0 on.
        seed: Seed of these factors.
        headers: Whether workers tell each other headers before each exchange, as in rounds. Gradients of each step have none.

    Raises:
        ConfigError: An attribute is out of range, or they do not fit together.
    """

    params: int
    links: Sequence[Trace]
    compute: float
    total: int
    steps: int = 30
    fragments: int = 1
    delay: int = 0
    latency: float = 0.0
    spread: float = 0.0
    seed: int = 0
    headers: bool = True

    def __post_init__(self) -> None:
        if len(self.links) < 2:
            raise ConfigError(f"{len(self.links)} links; allowed: one for each of at least 2 workers")
        if self.params < self.fragments:
            raise ConfigError(f"params={self.params} with fragments={self.fragments}; allowed: an element for each, or more")
        for name, least in (("total", 1), ("compute", 0), ("latency", 0), ("spread", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}; allowed: finite, from {least} on")
        check_timing(self.fragments, self.steps, None, self.delay, 0.0, UNIFORM)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One exchange of a fragment.

    Attributes:
        step: Number of local steps before it.
        fragment: Number of the fragment, from 0.
        start: Virtual time at which the last worker has begun it, in seconds.
        seconds: How long it takes, codecs included.
        waited: Seconds that a worker waits for its result, on average, the time until the last worker begins included.
        sent: Bytes that leave a worker, on average.
    """

    step: int
    fragment: int
    start: float
    seconds: float
    waited: float
    sent: float


@dataclasses.dataclass(frozen=True)
class LocalTraining:
    """What came of a simulation.

    Attributes:
        seconds: Virtual seconds until all workers share the same model at the end.
        computing: Seconds that a worker computes, on average.
        transfers: The exchanges, in the order in which their results were applied.
    """

    seconds: float
    computing: float
    transfers: list[Transfer]

    @property
    def efficiency(self) -> float:
        """The share of the time in which workers compute, 0 to 1."""
        return self.computing / self.seconds if self.seconds else 0.0

    @property
    def sent(self) -> float:
        """Bytes that leave a worker in all, on average."""
        return sum(one.sent for one in self.transfers)


@dataclasses.dataclass
class _Turn:
    """Of one fragment: the parts of its exchange, when it is exchanged and applied, and what is under way."""

    number: int
    parts: list
    following: int
    steps: int = 0  # since its last exchange
    due: int | None = None
    under_way: tuple = ()  # the step, the times of start and end, and the bytes


class _Clocks:
    """The virtual time of each worker, and what happens in it."""

    def __init__(self, setting: LocalSetting, codec: Codec, communicator: str):
        workers = len(setting.links)
        self._setting, self._now = setting, np.zeros(workers)
        self._links = list({id(link): link for link in setting.links}.values())
        self._latency = Link(setting.latency, setting.latency, 0.0)
        self._random = np.random.default_rng(setting.seed)
        self._headers = [ring_allgather(np.full(workers, HEADER.itemsize))] if setting.headers else []
        sizes = np.diff(np.linspace(0, setting.params, setting.fragments + 1).astype(int)).tolist()
        steps = {size: step_of(communicator, workers, size, codec) for size in set(sizes)}
        self._turns = [
            _Turn(number, [*self._headers, *steps[size]], first_exchange(number, setting.fragments, setting.steps))
            for number, size in enumerate(sizes)
        ]
        self._computing, self._free = np.zeros(workers), 0.0
        self._transfers: list[Transfer] = []

    def run(self) -> LocalTraining:
        setting, step = self._setting, 0
        while step < setting.total:
            before, step = (
                step,
                min(setting.total, *(at for turn in self._turns for at in (turn.following, turn.due or math.inf))),
            )
            self._compute(step - before)
            for turn in [turn for turn in self._turns if turn.due == step]:
                self._apply(turn)
            for turn in [turn for turn in self._turns if turn.following == step]:
                self._start(turn, step)
                turn.following += setting.steps
                if not setting.delay:
                    self._apply(turn)
        self._synchronize()
        return LocalTraining(float(self._now.max()), float(self._computing.mean()), self._transfers)

    def _compute(self, steps: int) -> None:
        spread, each = self._setting.spread, float(steps)
        if spread:
            each = np.exp(self._random.normal(-(spread**2) / 2, spread, (steps, self._now.size))).sum(axis=0)
        self._now += self._setting.compute * each
        self._computing += self._setting.compute * each
        for turn in self._turns:
            turn.steps += steps

    def _start(self, turn: _Turn, step: int) -> None:
        """The last worker begins the exchange, once the one before is over. Where no step was made, only headers go."""
        start = max(float(self._now.max()), self._free)
        parts = turn.parts if turn.steps else self._headers
        self._free = self._end(start, parts)
        turn.under_way = step, start, self._free, float(bytes_of(parts, "sent").mean())
        turn.steps, turn.due = 0, step + self._setting.delay

    def _end(self, now: float, parts: Sequence) -> float:
        """When parts that begin now are over: the slowest link ends a collective, in which all links carry as much."""
        for part in parts:
            if isinstance(part, Collective):
                now = max(link.end(now, part.path) for link in self._links) + self._latency.seconds(part.rounds, 0.0)
            else:
                now += part.seconds
        return now

    def _apply(self, turn: _Turn) -> None:
        step, start, end, sent = turn.under_way
        waited = np.maximum(0.0, end - self._now)
        self._now = np.maximum(self._now, end)
        self._transfers.append(Transfer(step, turn.number, start, end - start, float(waited.mean()), sent))
        turn.due, turn.under_way = None, ()

    def _synchronize(self) -> None:
        for turn in self._turns:
            if turn.due is not None:
                self._apply(turn)
        for turn in self._turns:
            self._start(turn, self._setting.total)
            self._apply(turn)


def simulate_local_steps(setting: LocalSetting, codec: Codec, communicator: str) -> LocalTraining:
    """Simulate a training with local steps. The same arguments give the same result, bit for bit.

    In an exchange, workers first tell each other headers; then each fragment goes as a single bucket, and a message waits for the
    one before, as the cost model has it. All codecs have a core to themselves.

    Args:
        setting: The training.
        codec: Sizes and seconds of the spec, such as grace_ext.policy.advisor.measure_codec gives.
        communicator: One that has a cost model: "allgather", "sharded", "allreduce", "tree" or "hierarchical".

    Returns:
        What came of it.

    Raises:
        ConfigError: There is no cost model of the communicator.
    """
    return _Clocks(setting, codec, communicator).run()


def fastest(setting: LocalSetting, codec: Codec, communicators: Sequence[str]) -> tuple[str, LocalTraining]:
    """Simulate a training with several communicators.

    Args:
        setting: The training.
        codec: See simulate_local_steps.
        communicators: Their names, at least one.

    Returns:
        The one that ends first, and what came of it.
    """
    found = {communicator: simulate_local_steps(setting, codec, communicator) for communicator in communicators}
    return min(found.items(), key=lambda one: one[1].seconds)

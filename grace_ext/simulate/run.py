"""Rounds of a federated server and its workers in virtual time: the parameter server of Kimad, Algorithm 3.

Server and clients are those of grace_ext.federated with EF21 in both directions, one pair for each layer; links are traces.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ConfigError
from ..federated import Client, Server
from ..pipeline.compressor import Compressor, make_compressor
from ..policy.bandwidth import BandwidthMonitor
from .policies import Sender
from .traces import Trace

_ANY_NORM = math.inf  # simulated workers are honest
_EXACT = make_compressor("dense/raw")
_WHOLE = 1e18  # bytes, more than any message has


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all policies that are compared have in common.

    Attributes:
        up: The trace of each worker's link to the server.
        down: The trace of the server's link to each worker.
        compute: Seconds that a worker takes for its gradient, 0 or more.
        steps: Number of steps, at least 1.
        rate: Learning rate.
        decays: Whether the rate decays linearly to 0.
        compression: A spec with a density, which the policy replaces.
        measured: Whether budgets follow from the last transfers as the workers see them, or from the trace itself.
        evaluations: How often accuracy is measured at most, the last step included; at least 1.
        seed: Seed of the compressors' random numbers.
        congestion: How many times as long a byte takes down as its link alone would need, α of section 3.1: 0 or more. With 0 the
            way down costs nothing, and everything is sent there by adaptive policies.
        warmup: Number of first steps in which all messages are exact, after which estimates are the model and the updates
            themselves (section 4.2); 0 or more.
        layer_rates: Factors of the learning rate, one for each layer; empty: 1 for all. See grace_ext.simulate.theory.
    """

    up: Sequence[Trace]
    down: Sequence[Trace]
    compute: float
    steps: int
    rate: float
    decays: bool = False
    compression: str = "topk:0.1/rice/qsgd:8"
    measured: bool = True
    evaluations: int = 20
    seed: int = 0
    congestion: float = 1.0
    warmup: int = 0
    layer_rates: Sequence[float] = ()

    def __post_init__(self):
        if not self.up or len(self.up) != len(self.down):
            raise ConfigError(f"{len(self.up)} traces up, {len(self.down)} down; allowed: one of each for every worker")
        for name, least in (("steps", 1), ("evaluations", 1), ("compute", 0), ("congestion", 0), ("warmup", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}; allowed: from {least} on")


@dataclasses.dataclass(frozen=True)
class Round:
    """One step.

    Attributes:
        step: Its number, from 0.
        start: Virtual time at its beginning, in seconds.
        seconds: Its duration in virtual time.
        loss: Mean loss of the workers before the step.
        accuracy: Accuracy after the step, 0 to 1; None where it was not measured.
        up: Mean bytes of a worker's message to the server.
        down: Mean bytes of a message to a worker.
        error: Mean squared error of what the server knows of a worker's update.
        bandwidth: Of worker 0 to the server: bytes per second at the step's start.
        sent: Of worker 0 to the server: bytes.
        density: Of worker 0 to the server: the share of all elements that it was to send.
    """

    step: int
    start: float
    seconds: float
    loss: float
    accuracy: float | None
    up: float
    down: float
    error: float
    bandwidth: float
    sent: int
    density: float


def simulate(task, policy, setting: Setting, progress: Callable[[Round], None] = lambda record: None) -> list[Round]:
    """Run a simulation. The same arguments give the same records, bit for bit.

    Args:
        task: One of tasks.py, or an object with the same attributes `start`, `layers`, `gradient` and `accuracy`.
        policy: One of policies.py.
        setting: The rest.
        progress: Called with each record.

    Returns:
        One record for each step.
    """
    simulation = _Simulation(task, policy, setting)
    records = []
    for step in range(setting.steps):
        records.append(simulation.step(step))
        progress(records[-1])
    return records


class _Link:
    """A worker's link in one direction."""

    def __init__(self, trace: Trace, measured: bool, congestion: float = 1.0):
        self._trace, self._measured, self._congestion = trace, measured, congestion
        self._monitor = BandwidthMonitor(window=1)

    def estimate(self, time: float) -> float:
        """Estimate the bandwidth, in bytes per second."""
        known = self._monitor.estimate if self._measured else None
        return self._trace.rate(time) if known is None else known

    def send(self, start: float, nbytes: int) -> float:
        """Return the time at which all bytes have arrived."""
        if not self._congestion:
            return start
        end = self._trace.end(start, self._congestion * nbytes)
        self._monitor.add(self._congestion * nbytes, start, end)
        self._monitor.end_step()
        return end


class _Simulation:
    def __init__(self, task, policy, setting: Setting):
        self._task, self._policy, self._setting = task, policy, setting
        self._now, self._rate = 0.0, setting.rate
        made = make_compressor(setting.compression)
        workers = range(len(setting.up))
        ends = np.cumsum(task.layers)[:-1]
        self._split = lambda vector: np.split(vector, ends)
        options = {"memory": "ef21", "seed": setting.seed}
        factors = setting.layer_rates or [1.0] * len(task.layers)
        if len(factors) != len(task.layers):
            raise ConfigError(f"layer_rates has {len(factors)} factors; the task has {len(task.layers)} layers")
        self._servers = [
            Server(
                start,
                len(workers),
                made,
                norm_limit=_ANY_NORM,
                optimizer=functools.partial(self._descend, factor),
                **options,
            )
            for start, factor in zip(self._split(task.start), factors, strict=True)
        ]
        self._clients = [
            [Client(start, made, number=worker, **options) for start in self._split(task.start)] for worker in workers
        ]
        self._down, self._up = Sender(made, task.layers, "down"), [Sender(made, task.layers, "up") for _ in workers]
        self._links_up = [_Link(trace, setting.measured) for trace in setting.up]
        self._links_down = [_Link(trace, setting.measured, setting.congestion) for trace in setting.down]
        self._warming = setting.warmup > 0

    def _descend(self, factor: float, model: np.ndarray, mean: np.ndarray) -> None:
        model -= np.float32(self._rate * factor) * mean

    def step(self, step: int) -> Round:
        self._rate = self._setting.rate * (1 - step / self._setting.steps if self._setting.decays else 1)
        self._warming = step < self._setting.warmup
        start, losses, errors, sizes, ended = self._now, [], [], [], []
        record = {"bandwidth": self._setting.up[0].rate(start)}
        messages = self._tell(start)
        for worker, parts in enumerate(messages):
            arrived = self._links_down[worker].send(start, _bytes(parts))
            model = np.concatenate([client.receive(part) for client, part in zip(self._clients[worker], parts, strict=True)])
            update, loss = self._task.gradient(model, worker, step)
            ready = arrived + self._setting.compute
            size, density, error = self._update(worker, self._split(update), ready)
            ended.append(self._links_up[worker].send(ready, size))
            losses.append(loss)
            errors.append(error)
            sizes.append(size)
            if worker == 0:
                record.update(sent=size, density=density)
        for server in self._servers:
            server.end_round()
        self._now = float(max(ended))
        every = -(-self._setting.steps // self._setting.evaluations)
        evaluated = (self._setting.steps - 1 - step) % every == 0
        accuracy = self._task.accuracy(np.concatenate([server.model for server in self._servers])) if evaluated else None
        return Round(
            step=step,
            start=start,
            seconds=self._now - start,
            loss=float(np.mean(losses)),
            accuracy=accuracy,
            up=float(np.mean(sizes)),
            down=float(np.mean([_bytes(parts) for parts in messages])),
            error=float(np.mean(errors)),
            **record,
        )

    def _tell(self, now: float) -> list[list[np.ndarray]]:
        """Begin a round: for each worker, make a message for each layer."""
        differences = [server.model - server.told.known for server in self._servers]
        budget = self._budget(min(link.estimate(now) for link in self._links_down)) if self._setting.congestion else _WHOLE
        densities, made = self._choose(self._down, differences, budget)
        for server, one in zip(self._servers, made, strict=True):
            server.begin_round(one)
        messages = [[server.message_for(worker) for server in self._servers] for worker in range(len(self._clients))]
        if not self._warming:
            self._down.sent([part.size for part in messages[0]], densities)
        return messages

    def _choose(self, sender: Sender, differences: list[np.ndarray], budget: float) -> tuple[list[float], list[Compressor]]:
        """Return a density and a compressor for each layer."""
        if self._warming:
            return [1.0] * len(differences), [_EXACT] * len(differences)
        return sender.choose(self._policy, differences, budget)

    def _update(self, worker: int, update: list[np.ndarray], now: float) -> tuple[int, float, float]:
        """Send a worker's messages; return their bytes, the share of elements and the squared error of the estimate."""
        clients = self._clients[worker]
        differences = [one - client.told for one, client in zip(update, clients, strict=True)]
        budget = self._budget(self._links_up[worker].estimate(now))
        densities, made = self._choose(self._up[worker], differences, budget)
        messages = [
            client.update_by(one, 1.0, compressor) for client, one, compressor in zip(clients, update, made, strict=True)
        ]
        for server, message in zip(self._servers, messages, strict=True):
            server.receive(worker, message)
        sizes = [message.size for message in messages]
        if not self._warming:
            self._up[worker].sent(sizes, densities)
        error = sum(
            float(np.sum(np.square(one - client.told, dtype=np.float64)))
            for one, client in zip(update, clients, strict=True)
        )
        return sum(sizes), float(np.average(densities, weights=self._task.layers)), error

    def _budget(self, rate: float) -> float:
        """Compute the bytes in one direction: c = B (t - T_comp) / (1 + α), equation (2) for α = 1."""
        if not self._policy.adaptive:
            return 0.0
        return rate * max(0.0, self._policy.seconds - self._setting.compute) / (1 + self._setting.congestion)


def _bytes(messages: Sequence[np.ndarray]) -> int:
    return sum(message.size for message in messages)

"""Ranks that make rounds of local steps in this process."""

import concurrent.futures
import math
from collections.abc import Callable

import numpy as np

from grace_ext.communicators.base import Communicator
from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.session import StateSession
from grace_ext.outer import make_outer
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import Rules
from grace_ext.rounds import ArrayParameters, Fragment, Rounds
from grace_ext.rounds.fragments import split
from grace_ext.rounds.rank_mean import separated

SHAPES = {"a": (60, 50), "bias": (50,), "b": (40, 50), "c": (30, 50)}


def arrays(seed: int = 0, shapes=SHAPES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


class Worker:
    """One rank: its arrays, its rounds. move: changes the arrays as a local step does. before: among other ranks, what it was."""

    def __init__(
        self,
        transport,
        *,
        start=None,
        buffers=None,
        compression="topk:0.1/rice/qsgd:7",
        memory="residual",
        outer="sgd",
        communicator="allgather",
        fragments=1,
        rules=None,
        schedule=None,
        most=math.inf,
        mean=None,
        before=None,
        **options,
    ):
        self.rank, self.size = transport.rank, transport.size
        self.arrays = start or arrays()
        self.buffers = buffers or {}
        self.parameters = ArrayParameters(self.arrays, self.buffers)
        self.executor = concurrent.futures.ThreadPoolExecutor(1)
        parts = []
        for number, tensors in enumerate(split(self.parameters.tensors(), fragments)):
            prefix = f"rounds{number}"
            exchange = Exchange(transport, memory, 1 / transport.size, executor=self.executor, schedule=schedule)
            shared: Communicator = parse_stage("communicator", communicator)
            shared = shared if mean is None else separated(shared, mean)
            exchange.set_buckets(build_buckets(exchange, [tensors], (), Rules(compression, rules), shared, prefix))
            states = StateSession(None, lambda *_: [])
            parts.append(Fragment(exchange, transport, make_outer(outer), self.parameters, states, prefix, most, mean))
        self.rounds = Rounds(parts, self.parameters, self.executor, **options)
        if before is not None:
            self.rounds.carry_over(before.rounds, before.rounds.state_dict())
        self.rounds.connect()

    def move(self, step: int) -> None:
        random = np.random.default_rng((self.rank, step))
        for array in self.arrays.values():
            array -= np.float32(0.01) * random.standard_normal(array.shape).astype(np.float32)

    def train(self, steps: int, first: int = 0, step: Callable | None = None) -> "Worker":
        for number in range(first, first + steps):
            (step or self.move)(number)
            self.rounds.step()
        return self

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate([array.ravel() for array in self.arrays.values()])

    @property
    def shared(self) -> np.ndarray:
        found = {name: array for fragment in self.rounds.fragments for name, array in fragment.shared.items()}
        return np.concatenate([found[name] for name in self.arrays])

"""Rounds of local steps out of the arguments that users give, whatever the framework."""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from grace_ext import ConfigError
from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.session import StateSession
from grace_ext.means import Mean, WeightedMean
from grace_ext.means.base import check_mean
from grace_ext.outer import OuterOptimizer, make_outer
from grace_ext.policy.defaults import PLAIN
from grace_ext.rounds import AutoSteps, Fragment, Parameters, Rounds
from grace_ext.rounds.fragments import Fragments, split
from grace_ext.rounds.presets import preset as find_preset
from grace_ext.rounds.rank_mean import separated
from grace_ext.rounds.weights import SAMPLES, UNIFORM
from grace_ext.transport.base import Transport

from .options import CompressionOptions

BUFFERS = ("average", "local")
AUTO = "auto"


class LocalOptions(CompressionOptions):
    """CompressionOptions of pseudo-gradients."""

    absent = ("groups", "selection", "grad_scaler")


@dataclasses.dataclass
class RoundSettings:
    """When fragments are exchanged, and how ranks count: arguments of LocalSteps, which describes them.

    Raises:
        ConfigError: `most_samples` is out of range, `buffers` or `steps` is unknown, or the mean does not work with the weights.
    """

    preset: str
    steps: int | str | Callable[[int], int] | None
    seconds: float | None
    outer: str | OuterOptimizer | None
    fragments: Fragments
    delay: int
    keep: float | str
    buffers: str
    weights: str = UNIFORM
    most_samples: float | None = None
    mean: Mean | None = None

    def __post_init__(self) -> None:
        if self.buffers not in BUFFERS:
            raise ConfigError(f"buffers={self.buffers!r}; allowed: {', '.join(map(repr, BUFFERS))}")
        if self.most_samples is not None and not (self.weights == SAMPLES and 0 < self.most_samples < math.inf):
            raise ConfigError(
                f"most_samples={self.most_samples} with weights={self.weights!r}; allowed: finite and above 0, with "
                f"weights={SAMPLES!r}"
            )
        chosen = find_preset(self.preset)
        self.mean = chosen.mean if self.mean is None else self.mean
        check_mean(self.mean, self.weights == UNIFORM)
        self.outer = chosen.outer if self.outer is None else self.outer
        if isinstance(self.steps, str):
            if self.steps != AUTO:
                raise ConfigError(
                    f"steps={self.steps!r}; allowed: a number, a function of the round, an AutoSteps or {AUTO!r}"
                )
            self.steps = AutoSteps()
        if self.seconds is None and self.steps is None:
            self.steps = chosen.steps
            if self.steps is None:
                raise ConfigError(f"preset {self.preset!r} has no usual number of steps: give steps= or seconds=")

    def options(self, compression: Any, memory: Any, options: dict) -> LocalOptions:
        """The options of the exchange, with the preset's where the user gave none.

        Args:
            compression: What the user gave, or None.
            memory: What the user gave, or None.
            options: All others.

        Returns:
            The options.
        """
        chosen = find_preset(self.preset)
        return LocalOptions.from_keywords(
            options,
            compression=chosen.compression if compression is None else compression,
            memory=chosen.memory if memory is None else memory,
            chosen=dataclasses.replace(PLAIN, small=chosen.small) if compression is None else PLAIN,
        )


def build_rounds(
    settings: RoundSettings,
    options: LocalOptions,
    transport: Transport,
    prefix: str,
    parameters: Parameters,
    gather_memories: Callable[..., list[dict]],
) -> tuple[Rounds, concurrent.futures.Executor]:
    """Make the rounds of a model; `connect` has to follow.

    Args:
        settings: See RoundSettings.
        options: See LocalOptions.
        transport: The adapter's transport.
        prefix: What the names of collectives begin with.
        parameters: The model.
        gather_memories: See StateSession.

    Returns:
        The rounds, and the executor of the one thread that issues their collectives.

    Raises:
        ConfigError: Arguments do not fit together.
    """
    density = str((options.schedule or {}).get("density"))
    if isinstance(settings.steps, AutoSteps) and density.startswith("kimad"):
        raise ConfigError(
            f"steps={settings.steps} with density {density!r}: either the steps or the density can follow the link; allowed: a "
            "number of steps, or another schedule"
        )
    parts = split(parameters.tensors(), settings.fragments)
    if options.capture is not None and len(parts) > 1:
        raise ConfigError(f"capture with {len(parts)} fragments: allowed with one")
    worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
    outer, made = make_outer(settings.outer), []  # type: ignore[arg-type]  # the preset has one
    mean = None if isinstance(settings.mean, WeightedMean) else settings.mean  # None: the sum that communicators take
    most = math.inf if settings.most_samples is None else settings.most_samples
    for number, tensors in enumerate(parts):
        name = f"{prefix}.fragment{number}"
        exchange = options.make_exchange(transport, 1 / transport.size, worker)
        communicator = options.make_communicator()
        if mean is not None:
            communicator = separated(communicator, mean)
        exchange.set_buckets(
            build_buckets(exchange, [tensors], (), options.make_rules(), communicator, name, options.largest_bucket)
        )
        states = StateSession(options.on_resize, gather_memories)
        made.append(Fragment(exchange, transport, outer, parameters, states, name, most, mean))
    rounds = Rounds(
        made,
        parameters,
        worker,
        steps=settings.steps,  # type: ignore[arg-type]  # "auto" has become an AutoSteps
        seconds=settings.seconds,
        delay=settings.delay,
        keep=settings.keep,
        weights=settings.weights,
    )
    return rounds, worker


def consolidate(rounds: Rounds, worker: concurrent.futures.Executor, to: int) -> None:
    """Gather the memories of all ranks on one, until the next round: a collective.

    Args:
        rounds: The rounds.
        worker: Their executor.
        to: The rank.
    """
    for fragment in rounds.fragments:
        gather = functools.partial(fragment.states.consolidate, fragment.exchange, fragment.names, fragment.prefix, to)
        worker.submit(gather).result()

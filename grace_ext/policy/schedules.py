"""Options of a spec that change from step to step, in the same way on all ranks.

Examples are a density that is warmed up, and a bit width that grows.
"""

from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np

from .. import registry
from ..errors import ConfigError
from ..observe.listener import BucketView, StepListener
from ..pipeline.compressor import Compressor
from ..pipeline.spec import parse_stage
from ..registry import Stage, register
from ..transport.base import Transport

_KINDS = ("transform", "sparsifier", "value")
_PROBED = (0, 1, 10, 100, 1000, 10_000)  # steps whose values are compared between ranks


class Schedule(Stage):
    """The value of an option by step."""

    kind = "schedule"
    #: Whether a listener decides on the value between steps, from what they showed.
    adaptive = False
    #: Whether the densities that the listener decides on are the same on all ranks, and belong into checkpoints.
    keeps_densities = False

    def at(self, step: int, final: float) -> float:
        """Compute the value in a step.

        Args:
            step: Number of the step, from 0.
            final: The value in the spec.

        Returns:
            The value.
        """
        raise NotImplementedError

    def listener(self, transport: Transport, densities: dict[str, float]) -> StepListener:
        """Make the listener that decides on the value; only where `adaptive` is true.

        Args:
            transport: The exchange's transport.
            densities: Density by bucket name, which the listener keeps up to date.

        Returns:
            The listener.
        """
        raise NotImplementedError


@register
class Constant(Schedule):
    """The same value in all steps.

    Args:
        value: The value; None: the spec's.
    """

    name = "constant"

    def __init__(self, value: float | None = None):
        self.value = value

    def at(self, step: int, final: float) -> float:
        return final if self.value is None else self.value


@register
class Warmup(Schedule):
    """From `start` to the spec's value within `steps` steps, in stages of equal length and with equal ratios between them.

    With the default and four epochs as steps, a density of 0.001 is reached by way of 0.25, 0.063, 0.016 and 0.004.

    Args:
        steps: Number of steps until the spec's value is reached.
        start: The value in the first stage.
        stages: Number of stages.

    Raises:
        ConfigError: An argument is outside its range.

    Source:
        Lin et al., Deep gradient compression, ICLR 2018, section 3.3: exponential warm-up of the density.
    """

    name = "warmup"

    def __init__(self, steps: int = 1000, start: float = 0.25, stages: int = 4):
        if steps < 1 or stages < 1 or not start > 0:
            raise ConfigError(
                f"warmup: steps={steps}, start={start}, stages={stages}; allowed: steps and stages from 1, start above 0"
            )
        self.steps, self.start, self.stages = steps, start, stages

    def at(self, step: int, final: float) -> float:
        if step >= self.steps:
            return final
        return self.start * (final / self.start) ** (step * self.stages // self.steps / self.stages)


@register
class Hyperbolic(Schedule):
    """From `start` down to the spec's value as 1 / step, so that it need not be known how long the training is.

    In step t, from 0, the value is the spec's times steps / (t + 1), rounded to two digits, where that is between the spec's
    and `start`. Each doubling of the number of steps so far takes as many further bytes as the one before, until the spec's
    value is reached after `steps` steps.

    Args:
        steps: Number of steps until the spec's value is reached.
        start: The largest value.

    Raises:
        ConfigError: An argument is outside its range.

    Source:
        Bytes are worth most at the start of a training: Lin et al., Deep gradient compression, ICLR 2018, section 3.3, who
        lower the density exponentially within a known number of epochs.
    """

    name = "hyperbolic"

    def __init__(self, steps: int = 300, start: float = 0.25):
        if steps < 1 or not start > 0:
            raise ConfigError(f"hyperbolic: steps={steps}, start={start}; allowed: steps from 1, start above 0")
        self.steps, self.start = steps, start

    def at(self, step: int, final: float) -> float:
        return max(final, min(self.start, float(f"{final * self.steps / (step + 1):.2g}")))


class Schedules:
    """Options by name ("density", "levels", …), each with a schedule.

    An option is that of the sparsifier, the value codec or the transform; parts that do not have it stay as they are.

    Args:
        schedules: By option, a Schedule, its spec ("warmup:500"), or a function step -> value.
    """

    #: Whether some spec has to have each option. False where nobody asked for the schedules.
    required = True

    def __init__(self, schedules: dict | None = None):
        self._schedules: dict[str, Callable] = {}
        self._functions: set[str] = set()
        for option, schedule in (schedules or {}).items():
            if callable(schedule):
                self._functions.add(option)
            elif not isinstance(schedule, Schedule):
                schedule = parse_stage("schedule", schedule)
            self._schedules[option] = schedule
        self._made: dict[tuple, Compressor] = {}
        #: By bucket, what an adaptive schedule has decided for the next step.
        self.densities: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._schedules)

    def listeners(self, transport: Transport) -> list[StepListener]:
        """Make the listeners of the schedules that are adaptive.

        Args:
            transport: The exchange's transport.

        Returns:
            The listeners.

        Raises:
            ConfigError: An adaptive schedule is for another option than the density.
        """
        found = {option: self._schedules[option] for option in self._schedules if self._is_adaptive(option)}
        if wrong := [option for option in found if option != "density"]:
            raise ConfigError(f"schedule {found[wrong[0]].name!r} is for the density, not for {', '.join(wrong)}")  # type: ignore[attr-defined]
        return [one.listener(transport, self.densities) for one in found.values()]  # type: ignore[attr-defined]

    def at(self, compressor: Compressor, step: int, density: float | None = None) -> Compressor:
        """Return the compressor with the values of a step.

        Args:
            compressor: The compressor without schedules.
            step: Number of the step.
            density: The density that an adaptive schedule has decided on; None if there is none yet.

        Returns:
            The compressor of that step. Raises ConfigError for a value that the option does not allow.
        """
        changed = [
            (kind, option, self._value(option, step, current, density))
            for option in self._schedules
            for kind, current in _options(compressor, option)
        ]
        if not changed:
            return compressor
        key = (compressor, *changed)
        if key not in self._made:
            if len(self._made) > 64:  # a function may give another value in every step
                self._made.clear()
            self._made[key] = _with_options(compressor, changed)
        return self._made[key]

    def _is_adaptive(self, option: str) -> bool:
        return option not in self._functions and self._schedules[option].adaptive  # type: ignore[attr-defined]

    def _value(self, option: str, step: int, current: float, density: float | None) -> float:
        schedule = self._schedules[option]
        if density is not None and self._is_adaptive(option):
            return density
        value = schedule(step) if option in self._functions else schedule.at(step, current)  # type: ignore[attr-defined]
        return round(value) if isinstance(current, int) else value

    @property
    def keeps_densities(self) -> bool:
        """Whether `densities` belong into checkpoints."""
        return any(self._is_adaptive(option) and schedule.keeps_densities for option, schedule in self._schedules.items())  # type: ignore[attr-defined]

    def kept_densities(self, buckets: Sequence[BucketView]) -> dict[str, np.ndarray]:
        """Copy the densities for a checkpoint.

        Args:
            buckets: The exchange's buckets.

        Returns:
            tensor name -> float32[1]; empty unless `keeps_densities`.
        """
        return {
            tensor.name: np.array([self.densities[bucket.name]], np.float32)
            for bucket in (buckets if self.keeps_densities else ())
            if bucket.name in self.densities
            for tensor in bucket.tensors
        }

    def restore_densities(self, buckets: Sequence[BucketView], kept: dict[str, np.ndarray]) -> None:
        """Take over what `kept_densities` returned. Without an entry for its tensors, a bucket keeps the density it has.

        Args:
            buckets: The exchange's buckets.
            kept: tensor name -> float32[1].
        """
        for bucket in buckets if self.keeps_densities else ():
            for tensor in bucket.tensors:
                if tensor.name in kept:
                    self.densities[bucket.name] = float(f"{float(kept[tensor.name][0]):.3g}")

    def check(self, compressors: Sequence[Compressor]) -> None:
        """Check that each option is that of some compressor, if they are `required`.

        Args:
            compressors: The compressors of all buckets.

        Raises:
            ConfigError: An option is that of none of them.
        """
        for option in self._schedules if self.required else ():
            if not any(_options(one, option) for one in compressors):
                known = sorted(
                    {
                        name
                        for one in compressors
                        for kind, stage in one.stages.items()
                        if kind in _KINDS
                        for name, value in stage.options().items()
                        if _is_number(value)
                    }
                )
                raise ConfigError(
                    f"schedule: no part of the specs has a number {option!r}; there are: {', '.join(known) or 'none'}"
                )

    def signature(self, compressors: Sequence[Compressor]) -> list:
        """Tell what must be the same on all ranks, for the configuration digest.

        Args:
            compressors: The compressors of all buckets.

        Returns:
            The specs of the schedules, and the compressors of some steps if functions decide.
        """
        steps = _PROBED if self._functions else ()
        return [(option, option in self._functions or str(schedule)) for option, schedule in self._schedules.items()] + [
            [str(self.at(one, step)) for step in steps] for one in compressors
        ]


def refuse_switching(schedule: Schedule, buckets: Sequence[BucketView]) -> None:
    """Check that no bucket switches between compressed and dense steps, of which a schedule of the density knows nothing.

    Args:
        schedule: The adaptive schedule.
        buckets: The exchange's buckets.

    Raises:
        ConfigError: One does.
    """
    for bucket in buckets:
        if bucket.memory.has_exact_steps:
            raise ConfigError(
                f"schedule {schedule.name!r} adapts the density, and memory {bucket.memory.name!r} has steps without one: use "
                f"one of them"
            )
        if bucket.communicator.switches:
            raise ConfigError(
                f"schedule {schedule.name!r} adapts the density, communicator 'auto' the strategy of "
                f"each bucket: use one of them"
            )


def with_density(compressor: Compressor, density: float) -> Compressor:
    """Return a compressor with another density.

    Args:
        compressor: The compressor.
        density: The density, above 0 and at most 1.

    Returns:
        The compressor that differs only in the density.

    Raises:
        ConfigError: The compressor has no density, or this one is out of range.
    """
    if not compressor.has_density:
        raise ConfigError(f"{str(compressor)!r} has no density that could be chosen")
    return _with_options(compressor, [("sparsifier", "density", density)])


def _with_options(compressor: Compressor, changed: list[tuple]) -> Compressor:
    """Make the compressor with other values of options, (kind, option, value) each."""
    stages = dict(compressor.stages)
    for kind, option, value in changed:
        stages[kind] = registry.build(kind, stages[kind].name, {**stages[kind].options(), option: value})
    return type(compressor)(stages, compressor.seed)


def _options(compressor: Compressor, option: str) -> list[tuple]:
    """(kind, value) of the parts that have a number of that name."""
    return [
        (kind, stage.options()[option])
        for kind, stage in compressor.stages.items()
        if kind in _KINDS and _is_number(stage.options().get(option))
    ]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)

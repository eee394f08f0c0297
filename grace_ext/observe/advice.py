"""Warnings, each once in a process, on rank 0: error feedback or compressed momentum in front of Adam; the residual keeps growing;
under Adam, too much of the gradients waits, or all of some tensors; the codecs cost more time than they save.

GRACE_EXT_WARN=0 in the environment, on all ranks, silences all of them.
"""

import math
import os
import statistics

from ..communicators.base import Pending
from ..transport.base import Transport
from ..transport.link_probe import time_collectives
from .base import warn
from .listener import BucketView
from .norms import lag

_VARIABLE = "GRACE_EXT_WARN"
_given: set[str] = set()


def warnings_wanted() -> bool:
    """Say whether the user wants the warnings.

    Returns:
        False if GRACE_EXT_WARN is 0.
    """
    return os.environ.get(_VARIABLE, "1") != "0"


def _warn(kind: str, text: str) -> None:
    if kind not in _given:
        _given.add(kind)
        warn(f"{text} ({_VARIABLE}=0 silences this.)")


def warn_of_residual(optimizer_memory: str | dict[str, str], density: float) -> None:
    """Warn, if warnings are wanted, that an Adam or a Muon gets error feedback of gradients because only the spec was chosen.

    Args:
        optimizer_memory: The memory that the optimizer has by default; see grace_ext.policy.default_for.
        density: The density of the spec, above 0.
    """
    if not warnings_wanted():
        return
    remedy = "leave out compression"
    if isinstance(optimizer_memory, str):
        steps = math.ceil(2.1 / density)
        remedy += f", or add memory={optimizer_memory!r} and schedule={{'density': 'hyperbolic:steps={steps}'}}"
    _warn(
        "residual",
        f"compression without memory means memory='residual', and Adam and Muon lose accuracy with error feedback of "
        f"gradients: the loss of a transformer rises by 7 % at a density of 1 % (docs/transformers.md). To keep "
        f"it, {remedy}. To have it so, give memory='residual'.",
    )


def warn_of_large_steps(gain: float) -> None:
    """Warn, if warnings are wanted, that memory `momentum` enlarges an Adam's steps.

    Args:
        gain: The largest factor; see grace_ext.memory.momentum.Momentum.step_gain.
    """
    if warnings_wanted():
        _warn(
            "steps",
            f"memory 'momentum' makes Adam's steps up to {gain:.1f} times as large as without compression, since Adam then divides by "
            f"the mean square of momenta, not of gradients. At the learning rate that is best without compression, the loss of a "
            f"transformer rises by 12 %, at half of it by 6 % (docs/transformers.md). Take memory='adam', which keeps Adam's "
            f"steps, or lower the learning rate.",
        )


class ResidualGrowthCheck:
    """Looks at the norms of the residual and of the gradient after 8, 16, 32, ... steps.

    A sparsifier that sends k of d elements lets the residual grow for some multiple of d / k steps, and bounds it, for
    gradients of norm g, by 2 g d / k (Karimireddy et al., ICML 2019, lemma 3). The compression ratio stands for d / k. So
    these are signs of an error that is not fed back but grows: a norm of 10 times the bound, at any time; or, after 4 d / k
    steps, three doublings of the number of steps in a row in which both the norm and its ratio to the gradient's grew by a
    quarter or more (a random walk grows by 1.41, a steady drift by 2).
    """

    FIRST, STREAK, FACTOR = 8, 3, 1.25
    _PATIENCE, _BOUND, _LONGEST = 4, 20.0, 4096

    def __init__(self) -> None:
        #: Number of steps with finite gradients.
        self.steps = 0
        self._largest = 0.0  # largest norm of the gradient so far
        self._before: tuple[float, float] | None = None
        self._streak = 0

    def wants(self) -> bool:
        """Say whether the step that begins now is one to look at.

        Returns:
            Whether `end_step` needs the norms of this step.
        """
        following = self.steps + 1
        return following >= self.FIRST and following & (following - 1) == 0

    def end_step(self, finite: bool, norms: dict[str, tuple[float, float]] | None, ratio: float) -> None:
        """Count a step, and warn if its norms show that the residual keeps growing.

        Args:
            finite: Whether the gradients of all ranks were finite.
            norms: By tensor, the L2 norms of the gradient and of the residual; None for a step that was not wanted.
            ratio: The compression ratio of the compressed tensors.
        """
        if not finite:
            return
        self.steps += 1
        if norms is None or "growth" in _given:
            return
        gradient = math.hypot(*(gradient for gradient, _ in norms.values()))
        residual = math.hypot(*(residual for _, residual in norms.values()))
        self._largest = max(self._largest, gradient)
        if not (gradient > 0 and math.isfinite(gradient)):
            return
        waits = min(max(ratio, 1.0), self._LONGEST)
        before, self._before = self._before, (residual, residual / gradient)
        grew = before is not None and all(
            now >= self.FACTOR * then > 0 for now, then in zip(self._before, before, strict=True)
        )
        self._streak = self._streak + 1 if grew and self.steps >= 2 * self._PATIENCE * waits else 0
        if residual > self._BOUND * waits * self._largest or self._streak >= self.STREAK:
            self._tell(norms, residual / gradient, before)

    def _tell(self, norms: dict[str, tuple[float, float]], ratio: float, before: tuple[float, float] | None) -> None:
        then = "" if before is None else f", {before[1]:.3g} times at step {self.steps // 2}"
        largest = sorted(norms, key=lambda name: -norms[name][1])[:3]
        _warn(
            "growth",
            f"the residual (what error feedback keeps for later) keeps growing: its norm is {ratio:.3g} times "
            f"the gradient's at step {self.steps}{then}; most of it in {', '.join(largest)}. Errors of the compression "
            f"are not made up for, and training may diverge. Send more of these tensors (a larger density, more levels, "
            f"or rules={{{largest[0]!r}: 'dense/raw'}}), take a codec whose error is smaller than its input, let the "
            f"residual fade (memory='residual:decay=0.9'), or use memory='none' if the codec is unbiased.",
        )


class LagCheck:
    """Looks at the lag of what memory `adam` compresses, after 64, 128, 256, ... steps.

    The lag is the energy of the residual over that of the gradient (grace_ext.observe.norms.lag). In docs/transformers.md, the
    loss rises with what lag / sqrt(steps) exceeds 0.15 by; it is near that without compression where this is at most about 1 at
    all times.
    """

    FIRST, LARGEST = 64, 2.0

    def end_step(self, steps: int, norms: dict[str, tuple[float, float]]) -> None:
        """Warn if too much waits.

        Args:
            steps: Number of steps so far, a power of two.
            norms: By tensor, the L2 norms of the gradient and of the residual.
        """
        found = lag([(gradient**2, residual**2) for gradient, residual in norms.values()])
        if steps < self.FIRST or found is None or found <= self.LARGEST * math.sqrt(steps):
            return
        largest = sorted(norms, key=lambda name: -norms[name][1])[:3]
        _warn(
            "lag",
            f"after {steps} steps the residuals hold {found:.3g} times the energy of a gradient, most of it in "
            f"{', '.join(largest)}. That is more than {self.LARGEST:g} times the root of the number of steps; where trainings under "
            f"Adam ended near the loss without compression, it was at most about once that root (docs/transformers.md). Send "
            f"more: a larger density; a density that follows what waits, schedule={{'density': 'guarded'}}; or more in the "
            f"first steps, as 'hyperbolic:steps=N' with N of at least 2.1 / density.",
        )


class StarvedCheck:
    """Looks for tensors with memory `adam` of which hardly anything is sent, after 256, 512, ... steps.

    If nothing of a tensor was sent, and its gradients were independent, the energy of its residual would be the sum of theirs. A
    tensor is starved whose residual holds half of that at two looks in a row, while those of all tensors hold an eighth of it
    or less. Elements are ranked together with those of other tensors, and Adam makes steps of the same size where gradients
    are small. Under the default, two tables of the model of docs/ncf.md held more than all of it, and no tensor of the transformer
    of docs/transformers.md held more than 0.2 after 256, 512 and 1,024 steps.
    """

    FIRST, STARVED, ALL = 256, 0.5, 0.125

    def __init__(self) -> None:
        self._before: dict[str, float] = {}  # energies of gradients at the look before, by tensor
        self._starved: set[str] = set()  # at that look

    def end_step(self, steps: int, norms: dict[str, tuple[float, float]]) -> None:
        """Warn if there are starved tensors.

        Args:
            steps: Number of steps so far, a power of two.
            norms: By tensor, the L2 norms of the gradient and of the residual.
        """
        energies = {name: gradient**2 for name, (gradient, _) in norms.items()}
        sums = {name: steps * (energy + self._before.get(name, energy)) / 2 for name, energy in energies.items()}
        waits = {name: residual**2 for name, (_, residual) in norms.items()}
        starved = {name for name, total in sums.items() if waits[name] >= self.STARVED * total > 0}
        again = sorted(starved & self._starved)
        self._before, self._starved = energies, starved if steps >= self.FIRST else set()
        if again and sum(waits.values()) <= self.ALL * sum(sums.values()):
            _warn(
                "starved",
                f"after {steps} steps hardly anything was sent of {', '.join(again[:3])}{' and others' if len(again) > 3 else ''}: the "
                f"gradients are small beside those of other tensors, with which they are ranked. Adam would make steps of the same size, "
                f"which come late; the hit rate of a recommendation model rose more slowly (docs/ncf.md). Rank them by themselves, for "
                f"example with rules={{{again[0]!r}: 'topk:0.1:per=tensor/auto/lloyd:0.05'}}.",
            )


class CodecCostCheck:
    """Compares the codecs' seconds with those that the link needs for the bytes that they save.

    The link's bandwidth comes from a few timed allreduces after the steps number 20, 200, 2000, ... of the exchange. That
    number is the same on all ranks, whatever each went through, so all take part. Seconds and bytes are those of the ten
    steps before.

    Args:
        transport: The exchange's transport.
    """

    _EVERY, _STEPS = 20, 10
    _SMALLEST = 2**17  # bytes of the first allreduce

    def __init__(self, transport: Transport):
        self._transport = transport
        self._seconds: list[float] = []
        self._bytes: list[tuple[float, float]] = []
        self._step = [0.0, 0.0, 0.0]

    def _probed(self, step: int) -> int:
        """Return the next step that is followed by a probe."""
        probed = self._EVERY
        while probed <= step:
            probed *= 10
        return probed - 1

    def counts_step(self, step: int) -> bool:
        """Say whether a step is one of the ten.

        Args:
            step: Number of the step.

        Returns:
            Whether it is.
        """
        return self._probed(step) - step < self._STEPS

    def add(self, bucket: BucketView, pending: Pending) -> None:
        """Count a bucket of a step that counts.

        Args:
            bucket: The bucket.
            pending: What it waited for.
        """
        ranks = self._transport.size
        ring, gather = 2 * (ranks - 1) / ranks, ranks - 1
        self._step[0] += pending.codec_seconds
        # What would be sent without compression: dense gradients by a ring, rows by an allgather.
        self._step[1] += ring * 4 * bucket.size if pending.gradient_bytes is None else gather * pending.gradient_bytes
        self._step[2] += bucket.communicator.wire_copies(self._transport) * pending.wire_bytes

    def forget(self) -> None:
        """Forget the step under way."""
        self._step = [0.0, 0.0, 0.0]

    def end_step(self, step: int, finite: bool, name: str) -> None:
        """End a step that counts, when nothing is under way. A collective if the step is followed by a probe.

        Args:
            step: Number of the step.
            finite: Whether the gradients of all ranks were finite.
            name: Name of the probe's collectives, the same on all ranks.
        """
        seconds, dense, sent = self._step
        self.forget()
        if finite:
            self._seconds.append(seconds)
            self._bytes.append((dense, sent))
        if step != self._probed(step):
            return
        bandwidth = self._bandwidth(name)
        if len(self._seconds) > self._STEPS // 2 and self._transport.rank == 0:
            self._compare(bandwidth)
        self._seconds.clear()
        self._bytes.clear()

    def _bandwidth(self, name: str) -> float:
        """Measure how many bytes per second a rank can send."""
        payload, seconds = time_collectives(self._transport.probe_transport(), name, smallest=self._SMALLEST)[-1]
        ranks = self._transport.size
        return 2 * (ranks - 1) / ranks * payload / seconds

    def _compare(self, bandwidth: float) -> None:
        codec = statistics.median(self._seconds)
        dense, sent = (statistics.median(column) for column in zip(*self._bytes, strict=True))
        saved = (dense - sent) / bandwidth
        if codec > saved:
            _warn(
                "cost",
                f"compression costs more time than it saves here: {1e3 * codec:.3g} ms a step for encoding and "
                f"decoding, against the {1e3 * saved:.3g} ms that it takes to send {dense / 1e6:.3g} MB (uncompressed, by "
                f"a ring) instead of {sent / 1e6:.3g} MB at {8e-9 * bandwidth:.3g} Gbit/s, which is what an allreduce "
                f"reached just now. On this link send plain gradients ('dense/raw') or half precision ('dense/fp16' with "
                f"communicator='allreduce').",
            )

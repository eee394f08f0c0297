"""Whether compression pays, and which: predicted steps from the link, the workers and this machine's measured codecs.

The rule of thumb is that of compute time against communication time (a survey's advisor: compute-bound from a ratio of two
on); here the times of every way come from the cost model, codecs included, so that "do not compress" is an answer where they
cost more than they save. Speed alone recommends nothing: a way is recommended with an optimizer only where a measurement has
shown that accuracy stays with that density, memory and optimizer.
"""

import dataclasses
import math

import numpy as np

from ..errors import ConfigError
from ..pipeline.compressor import make_compressor
from . import cost_model
from .rules import DEFAULT_SPEC

_MEASURED = 2**21  # elements of the gradients that codecs are measured with
_GRADIENTS = 3
_NEAR = 1.05  # times the fastest: of such ways, the most exact is recommended
_LINEAR = "allreduce"


#: Kinds of optimizers. "sgd" is SGD with momentum; "adam" stands for Adam, AdamW and their kin.
OPTIMIZERS = ("sgd", "adam")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What accuracy a way was measured to have, on average over seeds, against no compression, with an optimizer.

    points: of accuracy gained; seeds: how many; what: the task; page: of docs/, with a table that has the row.
    """

    optimizer: str
    points: float
    seeds: int
    what: str
    page: str
    row: str

    @property
    def is_kept(self) -> bool:
        return self.points >= -MAY_LOSE and self.seeds >= SEEDS

    def __str__(self):
        return f"{self.points:+.2f} points with {self.optimizer} on {self.what}, {self.seeds} seed(s), docs/{self.page}"


@dataclasses.dataclass(frozen=True)
class Way:
    """spec and memory: what is sent; None: float32 by the library's own allreduce. rounds: it only rounds every element, as
    Horovod's own fp16 does, with any optimizer. evidence: of the others. note: what else belongs to it."""

    label: str
    spec: str | None
    memory: str = "none"
    rounds: bool = False
    evidence: tuple[Evidence, ...] = ()
    note: str = ""

    def keeps_accuracy(self, optimizer: str) -> bool:
        """Whether a measurement has shown it, and none the contrary."""
        found = [one for one in self.evidence if one.optimizer == optimizer]
        return self.rounds or bool(found) and all(one.is_kept for one in found)

    def shown(self) -> str:
        """With which optimizers accuracy was kept, for a table."""
        return ", ".join(filter(self.keeps_accuracy, OPTIMIZERS)) or "not shown"


MAY_LOSE, SEEDS = 0.5, 3  # points of accuracy on average, and over how many seeds at least
_CNN, _TEXT = "a CNN (Fashion-MNIST)", "an LSTM (text)"
#: The more exact first.
WAYS = (
    Way("none", None, rounds=True),
    Way("fp16", "dense/fp16", rounds=True),
    Way("8 bits", "dense/qsgd:8"),
    Way(
        "default",
        DEFAULT_SPEC,
        "residual",
        evidence=(
            Evidence("sgd", -0.09, 3, _CNN, "memories.md", "top-k 1 %, residual"),
            Evidence("adam", -1.65, 1, _TEXT, "benchmarks.md", "grace_ext, default (allgather)"),
        ),
    ),
    Way(
        "top 0.1 %",
        "topk:0.001/rice/qsgd:7",
        "dgc:nesterov=true",
        note="an optimizer without momentum, and schedule={'density': 'warmup:steps=N'} over the first epoch",
        evidence=(Evidence("sgd", -0.42, 3, _CNN, "memories.md", "top-k 0.1 %, dgc"),),
    ),
)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds and bytes of a step of each worker. codec and wire: before any of them hides behind backward."""

    way: Way
    communicator: str
    step_seconds: float
    codec_seconds: float
    wire_seconds: float
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class Advice:
    """predictions: of all ways, each by its fastest communicator, in the order of WAYS. reason: a sentence for
    the recommended one, and a line for each faster one that is not recommended."""

    predictions: list[Prediction]
    recommended: Prediction
    reason: str


def advise(
    params: int,
    step_time: float,
    bandwidth: float,
    workers: int,
    *,
    per_host: int = 1,
    latency: float = 1e-4,
    overlap: float = 0.5,
    strict: bool = False,
    optimizer: str | None = None,
    codecs: dict | None = None,
) -> Advice:
    """What a step will take with each way of exchanging gradients.

    params: float32 elements of the gradient. step_time: seconds of a step without any exchange. bandwidth: of a host's link,
    bits per second in each direction. workers: in all, of which per_host share a host and its link. latency: seconds of a
    message. overlap: the share of step_time that codecs and the exchange can hide behind, 0 to 1. strict: recommend only
    what does no more than round every element. optimizer: one of OPTIMIZERS; recommended is only what was shown to keep
    accuracy with it, and where it is not told, with all of them. codecs: spec -> cost_model.Codec; missing ones are
    measured here, on one core. Raises ConfigError for numbers that make no sense.
    """
    _check(params, step_time, bandwidth, workers, per_host, latency, overlap)
    if optimizer not in (None, *OPTIMIZERS):
        raise ConfigError(f"optimizer={optimizer!r}; allowed: {', '.join(OPTIMIZERS)} or None")
    codecs = {**(codecs or {})}
    links = dict.fromkeys(("allgather", "alltoall", "allreduce"), cost_model.Link(latency, latency, 8 / bandwidth))
    predictions = []
    for way in WAYS:
        if way.spec is not None and way.spec not in codecs:
            codecs[way.spec] = measured(way.spec)
        codec = _FREE if way.spec is None else codecs[way.spec]
        ways = [
            _predict(way, communicator, codec, params, step_time, workers, per_host, links, overlap)
            for communicator in _communicators(way, workers, per_host)
        ]
        predictions.append(min(ways, key=lambda one: one.step_seconds))
    wanted = OPTIMIZERS if optimizer is None else (optimizer,)
    allowed = [one for one in predictions if one.way.rounds or not strict and all(map(one.way.keeps_accuracy, wanted))]
    fastest = min(one.step_seconds for one in allowed)
    chosen = next(one for one in allowed if one.step_seconds <= _NEAR * fastest)
    return Advice(predictions, chosen, _reason(predictions, allowed, chosen, step_time, overlap, strict, wanted))


def measured(spec: str) -> cost_model.Codec:
    """The codec of a spec on this machine, by synthetic gradients with heavy tails."""
    made = make_compressor(spec)
    gradients = [np.random.default_rng(seed).standard_t(3, _MEASURED).astype(np.float32) for seed in range(_GRADIENTS)]
    if made.reducible_dtype is not None:
        one = cost_model.measure_linear(made, gradients[0])
        scaled = np.dtype(made.reducible_dtype).itemsize
        return cost_model.Codec(
            lambda elements, summed: scaled * elements,
            lambda elements: one.encode(0) * elements / _MEASURED,
            lambda elements, containers: one.decode(0, 1) * elements / _MEASURED,
        )
    return cost_model.measure(made, gradients)


#: Of what the library sends as if we were not there.
_FREE = cost_model.Codec(lambda elements, summed: 4 * elements, lambda elements: 0.0, lambda elements, containers: 0.0)


def _communicators(way: Way, workers: int, per_host: int) -> list[str]:
    if way.spec is None or make_compressor(way.spec).reducible_dtype is not None:
        return [_LINEAR]
    found = ["allgather", *(["sharded"] if workers > 2 else [])]
    return [*found, "hierarchical"] if 1 < per_host < workers else found


def _predict(way, communicator, codec, params, step_time, workers, per_host, links, overlap) -> Prediction:
    hosts = [rank // per_host for rank in range(workers)]
    step = cost_model.step_of(communicator, workers, params, codec, hosts)
    codec_seconds = cost_model.codec_seconds(step)
    # A ring through the hosts crosses each link once. In an alltoall, all workers of a host send at a time.
    wire = sum(
        links[part.name].seconds(part.rounds, part.path * (per_host if part.name == "alltoall" else 1))
        for part in step
        if isinstance(part, cost_model.Collective)
    )
    exposed = max(0.0, codec_seconds + wire - overlap * step_time)
    sent = float(cost_model.bytes_of(step, "sent").mean())
    return Prediction(way, communicator, step_time + exposed, codec_seconds, wire, sent)


def _reason(
    predictions: list[Prediction],
    allowed: list[Prediction],
    chosen: Prediction,
    step_time: float,
    overlap: float,
    strict: bool,
    wanted: tuple[str, ...],
) -> str:
    none = predictions[0]
    best = min((one for one in allowed if one is not none), key=lambda one: one.step_seconds)
    if chosen is none and none.wire_seconds <= overlap * step_time:
        return "do not compress: sending float32 takes no longer than what it can hide behind"
    if chosen is none:
        how = (
            "its codecs take as long as the bytes that they save"
            if best.codec_seconds > best.wire_seconds
            else ("too little of the step is spent on the link")
        )
        text = (
            f"do not compress: {best.way.label!r}, the fastest other way, would be "
            f"{none.step_seconds / best.step_seconds:.2f} times as fast, for {how}"
        )
    else:
        speed = none.step_seconds / chosen.step_seconds
        text = f"{chosen.way.label!r} by {chosen.communicator}: {speed:.1f} times as fast as none"
        if not chosen.way.rounds:
            shown = "; ".join(str(one) for one in chosen.way.evidence if one.optimizer in wanted)
            text += f". It needs memory={chosen.way.memory!r}" + (f" and {chosen.way.note}" if chosen.way.note else "")
            text += f". Accuracy: {shown}; check it on your model"
    faster = [one for one in predictions if one not in allowed and one.step_seconds * _NEAR < chosen.step_seconds]
    return "\n".join([text, *(_left_out(one, none, strict, wanted) for one in faster)])


def _left_out(one: Prediction, none: Prediction, strict: bool, wanted: tuple[str, ...]) -> str:
    """Why a faster way is not recommended."""
    text = f"{one.way.label!r} would be {none.step_seconds / one.step_seconds:.1f} times as fast as none, but "
    if strict and all(map(one.way.keeps_accuracy, wanted)):
        return text + "does more than round, which strict does not allow"
    against = [str(found) for found in one.way.evidence if found.optimizer in wanted and not found.is_kept]
    if against:
        text += f"it lost accuracy: {'; '.join(against)}"
    else:
        text += f"was not shown to keep accuracy with {' and '.join(wanted)}"
    kept = ", ".join(filter(one.way.keeps_accuracy, wanted))
    return text + (f" (it was with {kept})" if kept else "")


def _check(params, step_time, bandwidth, workers, per_host, latency, overlap) -> None:
    for name, value, least in (("params", params, 1), ("workers", workers, 2), ("per_host", per_host, 1)):
        if not (isinstance(value, int | np.integer) and value >= least):
            raise ConfigError(f"{name}={value}; allowed: whole numbers from {least} on")
    for name, value, zero in (("step_time", step_time, False), ("bandwidth", bandwidth, False), ("latency", latency, True)):
        if not (math.isfinite(value) and (value > 0 or zero and value == 0)):
            raise ConfigError(f"{name}={value}; allowed: finite, {'from 0 on' if zero else 'above 0'}")
    if not 0 <= overlap <= 1:
        raise ConfigError(f"overlap={overlap}; allowed: 0 to 1")
    if workers % per_host:
        raise ConfigError(f"workers={workers}, per_host={per_host}: hosts would have different numbers of workers")


def report(advice: Advice) -> str:
    """A table, and the recommendation."""
    text_columns = 5
    rows = [("way", "spec", "memory", "communicator", "accuracy kept with", "ms a step", "codecs", "wire", "bytes sent")]
    rows += [
        (
            one.way.label + ("  *" if one is advice.recommended else ""),
            one.way.spec or "",
            one.way.memory,
            one.communicator,
            one.way.shown(),
            f"{1e3 * one.step_seconds:,.1f}",
            f"{1e3 * one.codec_seconds:,.1f}",
            f"{1e3 * one.wire_seconds:,.1f}",
            f"{one.sent_bytes:,.0f}",
        )
        for one in advice.predictions
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if number < text_columns else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", advice.reason])

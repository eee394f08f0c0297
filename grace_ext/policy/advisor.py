"""Advice on whether compression pays, and which: predicted steps from the link, the workers and this machine's codecs.

The rule of thumb is that of compute time against communication time (a survey's advisor: compute-bound from a ratio of two
on). Here the times of every method come from the cost model, codecs included, so that "do not compress" is an answer where
they cost more than they save.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .._util.text_table import text_table
from ..errors import ConfigError
from ..pipeline.compressor import make_compressor
from . import codec_timing, cost_model
from .methods import METHODS, OPTIMIZERS, Method
from .projections import WORKERS, efficiency, optimal_ratio

_MEASURED = 2**21  # elements of the gradients that codecs are measured with
_GRADIENTS = 3
_SIDE = 1024  # rows and columns of the matrices that low-rank methods are measured with
_NEAR = 1.05  # of methods within this factor of the fastest, the most exact is recommended


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted step of a method.

    Attributes:
        method: The method.
        communicator: Name of the communicator.
        step_seconds: Seconds of a step.
        codec_seconds: Seconds of codec work in each worker, before any of it hides behind backward.
        wire_seconds: Seconds of the collectives, before any of them hides behind backward.
        sent_bytes: Bytes that a worker sends, on average.

    Where a method exchanges only every few steps, all of these are of one step on average.
    """

    method: Method
    communicator: str
    step_seconds: float
    codec_seconds: float
    wire_seconds: float
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class Advice:
    """Predictions and a recommendation.

    Attributes:
        predictions: The predictions of all methods, each with its fastest communicator, in the order of METHODS.
        recommended: The recommended prediction.
        reason: A sentence for the recommended one, and a line for each faster one that is not recommended.
        ratio: The optimal ratio of the link: see projections.optimal_ratio.
    """

    predictions: list[Prediction]
    recommended: Prediction
    reason: str
    ratio: float


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
    """Predict what a step takes with each method of exchanging gradients, and recommend one.

    Args:
        params: Number of float32 elements of the gradient.
        step_time: Seconds of a step without any exchange.
        bandwidth: Bandwidth of a host's link, in bits per second in each direction.
        workers: Number of workers in all.
        per_host: Number of workers that share a host and its link.
        latency: Seconds of a message.
        overlap: The share of step_time that codecs and the exchange can hide behind, 0 to 1.
        strict: Whether to recommend only what does no more than round every element.
        optimizer: One of OPTIMIZERS: only what was shown to keep accuracy with it is recommended. None: only what was shown
            to with all of them.
        codecs: cost_model.Codec by spec; missing ones are measured here, on one core. Low-rank methods are taken to have
            square matrices of 1,024 columns.

    Returns:
        The predictions and the recommendation.

    Raises:
        ConfigError: A number is outside its range, or the optimizer is not known.
    """
    _check(params, step_time, bandwidth, workers, per_host, latency, overlap)
    if optimizer not in (None, *OPTIMIZERS):
        raise ConfigError(f"optimizer={optimizer!r}; allowed: {', '.join(OPTIMIZERS)} or None")
    codecs = measure_codecs(codecs)
    links = dict.fromkeys(("allgather", "alltoall", "allreduce"), cost_model.Link(latency, latency, 8 / bandwidth))
    predictions = []
    for method in METHODS:
        codec = _FREE if method.spec is None else codecs[method.spec]
        options = [
            _predict(method, communicator, codec, params, step_time, workers, per_host, links, overlap)
            for communicator in method.communicators or cost_model.communicators_for(method.spec, workers, per_host)
        ]
        predictions.append(min(options, key=lambda one: one.step_seconds))
    wanted = OPTIMIZERS if optimizer is None else (optimizer,)
    allowed = [one for one in predictions if one.method.rounds or not strict and all(map(one.method.keeps_accuracy, wanted))]
    fastest = min(one.step_seconds for one in allowed)
    chosen = next(one for one in allowed if one.step_seconds <= _NEAR * fastest)
    reason = _reason(predictions, allowed, chosen, step_time, overlap, strict, wanted)
    ratio = optimal_ratio(params, step_time, bandwidth, workers, latency=latency, overlap=overlap)
    return Advice(predictions, chosen, reason, ratio)


def efficiencies(
    params: int,
    step_time: float,
    bandwidth: float,
    *,
    workers: Iterable[int] = WORKERS,
    strong: bool = False,
    codecs: dict | None = None,
    **options: Any,
) -> dict[str, dict[int, float]]:
    """Predict the efficiency E(P) of each method for many numbers of workers.

    Args:
        params: See advise.
        step_time: See advise; with `strong`, that of one worker which computes everything.
        bandwidth: See advise.
        workers: The numbers of workers, P.
        strong: See projections.efficiency.
        codecs: See advise.
        **options: See advise.

    Returns:
        E(P) by the number of workers, by the method's label.

    Raises:
        ConfigError: A number is outside its range.
    """
    codecs = measure_codecs(codecs)
    found: dict[str, dict[int, float]] = {}
    for count in workers:
        each = step_time / count if strong else step_time
        for one in advise(params, each, bandwidth, count, codecs=codecs, **options).predictions:
            shares = found.setdefault(one.method.label, {})
            shares[count] = efficiency(step_time, count, one.step_seconds - each, strong)
    return found


def measure_codecs(known: dict | None = None) -> dict[str, cost_model.Codec]:
    """Measure the codecs of all methods that are not known yet.

    Args:
        known: Codecs by spec.

    Returns:
        The codec of each spec of METHODS, and those that are known.
    """
    specs = [method.spec for method in METHODS if method.spec is not None]
    return {**{spec: measure_codec(spec) for spec in specs if spec not in (known or {})}, **(known or {})}


def measure_codec(spec: str, elements: int = _MEASURED) -> cost_model.Codec:
    """Measure the codec of a spec on this machine, with synthetic gradients with heavy tails.

    Args:
        spec: The spec.
        elements: Number of elements of these gradients. Beyond it, sizes and seconds are taken to grow with the elements.

    Returns:
        The codec for the cost model.
    """
    made = make_compressor(spec)
    if made.lowrank is not None:
        return codec_timing.measure_factors(made.lowrank, _SIDE)
    gradients = [np.random.default_rng(seed).standard_t(3, elements).astype(np.float32) for seed in range(_GRADIENTS)]
    if made.reducible_dtype is not None:
        one = codec_timing.measure_reducible_codec(made, gradients[0])
        scaled = np.dtype(made.reducible_dtype).itemsize
        return cost_model.Codec(
            lambda d, summed: scaled * d,
            lambda d: one.encode(0) * d / elements,
            lambda d, containers: one.decode(0, 1) * d / elements,
        )
    return codec_timing.measure_codec(made, gradients)


#: The codec of gradients that the library sends itself.
_FREE = cost_model.Codec(lambda elements, summed: 4 * elements, lambda elements: 0.0, lambda elements, containers: 0.0)


def _predict(
    method: Method,
    communicator: str,
    codec: cost_model.Codec,
    params: int,
    step_time: float,
    workers: int,
    per_host: int,
    links: dict[str, cost_model.Link],
    overlap: float,
) -> Prediction:
    hosts = [rank // per_host for rank in range(workers)]
    step = cost_model.step_of(communicator, workers, params, codec, hosts)
    codec_seconds = cost_model.codec_seconds(step)
    # A ring through the hosts crosses each link once. In an alltoall, all workers of a host send at the same time.
    wire = sum(
        links[part.name].seconds(part.rounds, part.path * (per_host if part.name == "alltoall" else 1))
        for part in step
        if isinstance(part, cost_model.Collective)
    )
    hidden = overlap * step_time if method.interval == 1 else 0.0
    exposed = max(0.0, codec_seconds + wire - hidden)
    sent = float(cost_model.bytes_of(step, "sent").mean())
    each = 1 / method.interval
    return Prediction(method, communicator, step_time + each * exposed, each * codec_seconds, each * wire, each * sent)


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
            f"do not compress: {best.method.label!r}, the fastest other method, would be "
            f"{none.step_seconds / best.step_seconds:.2f} times as fast, for {how}"
        )
    else:
        speed = none.step_seconds / chosen.step_seconds
        text = f"{chosen.method.label!r} by {chosen.communicator}: {speed:.1f} times as fast as none"
        if not chosen.method.rounds:
            shown = "; ".join(str(one) for one in chosen.method.evidence if one.optimizer in wanted)
            text += f". It needs memory={chosen.method.memory!r}" + (
                f" and {chosen.method.note}" if chosen.method.note else ""
            )
            text += f". Accuracy: {shown}; check it on your model"
    faster = [one for one in predictions if one not in allowed and one.step_seconds * _NEAR < chosen.step_seconds]
    return "\n".join([text, *(_left_out(one, none, strict, wanted) for one in faster)])


def _left_out(one: Prediction, none: Prediction, strict: bool, wanted: tuple[str, ...]) -> str:
    """Say why a faster method is not recommended."""
    text = f"{one.method.label!r} would be {none.step_seconds / one.step_seconds:.1f} times as fast as none, but "
    if strict and all(map(one.method.keeps_accuracy, wanted)):
        return text + "does more than round, which strict does not allow"
    against = [str(found) for found in one.method.evidence if found.optimizer in wanted and not found.is_kept]
    if against:
        text += f"it lost accuracy: {'; '.join(against)}"
    else:
        text += f"was not shown to keep accuracy with {' and '.join(wanted)}"
    kept = ", ".join(filter(one.method.keeps_accuracy, wanted))
    return text + (f" (it was with {kept})" if kept else "")


def _check(
    params: int, step_time: float, bandwidth: float, workers: int, per_host: int, latency: float, overlap: float
) -> None:
    for name, value, least in (("params", params, 1), ("workers", workers, 2), ("per_host", per_host, 1)):
        if not (isinstance(value, int | np.integer) and value >= least):
            raise ConfigError(f"{name}={value}; allowed: whole numbers from {least} on")
    for name, real, zero in (("step_time", step_time, False), ("bandwidth", bandwidth, False), ("latency", latency, True)):
        if not (math.isfinite(real) and (real > 0 or zero and real == 0)):
            raise ConfigError(f"{name}={real}; allowed: finite, {'from 0 on' if zero else 'above 0'}")
    if not 0 <= overlap <= 1:
        raise ConfigError(f"overlap={overlap}; allowed: 0 to 1")
    if workers % per_host:
        raise ConfigError(f"workers={workers}, per_host={per_host}: hosts would have different numbers of workers")


def report(advice: Advice) -> str:
    """Format advice as text.

    Args:
        advice: What `advise` returned.

    Returns:
        A table of the predictions, with an asterisk at the recommended one, and the reason.
    """
    rows = [("method", "spec", "memory", "communicator", "accuracy kept with", "ms a step", "codecs", "wire", "bytes sent")]
    rows += [
        (
            one.method.label + ("  *" if one is advice.recommended else ""),
            one.method.spec or "",
            one.method.memory,
            one.communicator,
            one.method.kept_with(),
            f"{1e3 * one.step_seconds:,.1f}",
            f"{1e3 * one.codec_seconds:,.1f}",
            f"{1e3 * one.wire_seconds:,.1f}",
            f"{one.sent_bytes:,.0f}",
        )
        for one in advice.predictions
    ]
    ratio = (
        f"optimal ratio of this link: {advice.ratio:.3g} of the float32 bytes; the allreduce of more takes longer than what it can "
        f"hide behind"
        if advice.ratio
        else "optimal ratio of this link: none, its latency alone takes longer than what an exchange can hide behind"
    )
    return "\n".join([text_table(rows, text_columns=range(5)), "", ratio, advice.reason])

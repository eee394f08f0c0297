"""What follows from the cost model and the theory: the ratio that a link needs, efficiency by number of workers, a bound."""

import math
from collections.abc import Iterable

import numpy as np

from .._util.text_table import text_table
from ..errors import ConfigError
from ..pipeline import container
from ..pipeline.compressor import make_compressor
from ..pipeline.decoder import decode_sum
from . import cost_model

#: The numbers of workers of a table of efficiencies.
WORKERS = tuple(2**n for n in range(1, 11))


def optimal_ratio(
    params: int, step_time: float, bandwidth: float, workers: int, *, latency: float = 0.0, overlap: float = 1.0
) -> float:
    """Compute the ratio of compression at which an allreduce takes as long as the step that it can hide behind.

    Compressing less costs time; compressing more saves none. The survey's formula is that of two workers, without latency
    and with a full overlap.

    Args:
        params: Number of float32 elements of the gradient.
        step_time: Seconds of a step without any exchange.
        bandwidth: Bandwidth of a worker's link, in bits per second in each direction.
        workers: Number of workers, at least 2.
        latency: Seconds of a message.
        overlap: The share of step_time that the exchange can hide behind, 0 to 1.

    Returns:
        The share of the float32 bytes, from 0 (the latency alone takes longer) to 1 (no compression is needed).

    Source:
        A survey of gradient compression, "Convergence with compression", optimal_compression_level.
    """
    step = cost_model.ring_allreduce(workers, 4 * params)
    left = overlap * step_time - latency * (step.rounds + 1)
    return min(1.0, max(0.0, left / (step.path * 8 / bandwidth)))


def efficiency(step_time: float, workers: int, exchange_seconds: float, strong: bool = False) -> float:
    """Compute the share of the workers' time that goes into the training itself, E(P).

    Args:
        step_time: Seconds of a step on one worker, without any exchange.
        workers: Number of workers, P.
        exchange_seconds: Seconds that the exchange adds to a step.
        strong: Whether the workers share the work of a step, so that each computes for step_time / P; otherwise each has a
            batch of its own.

    Returns:
        E(P), from 0 to 1.

    Raises:
        ConfigError: A number is outside its range.

    Source:
        The system design of top-k with error feedback, section 5, is the strong one: 1 / (1 + P T_comm / T_compute).
    """
    for name, value in (("step_time", step_time), ("workers", workers)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value}; allowed: finite and above 0")
    if not 0 <= exchange_seconds < math.inf:
        raise ConfigError(f"exchange_seconds={exchange_seconds}; allowed: finite and from 0 on")
    computing = step_time / workers if strong else step_time
    return computing / (computing + exchange_seconds)


def contraction(spec: str, gradient: np.ndarray) -> float:
    """Measure how much of a gradient a compressor leaves out: the least δ² of ‖g − C(g)‖² ≤ δ² ‖g‖² for this gradient.

    Args:
        spec: The spec, of containers.
        gradient: float32[d], finite and not zero.

    Returns:
        δ². Of top-k it is at most 1 − k / d.

    Raises:
        ConfigError: The spec makes no containers.
    """
    blob = make_compressor(spec).compress(gradient)
    sent = np.empty(gradient.size, np.float32)
    decode_sum([container.parse(blob, gradient.size)], sent, 1.0)
    left = gradient.astype(np.float64) - sent
    return float(left @ left / (gradient.astype(np.float64) @ gradient))


def error_bound(steps: int, gradient_norm: float, learning_rate: float, contraction: float) -> float:
    """Compute the survey's bound of the expected error after some steps of SGD with error feedback: G / √T + δ² η G².

    The first term is that of the noise of gradients and falls with the steps. The second one is the price of compression, and
    stays. The constants of the theorem are 1, so that it serves to compare compressors and learning rates, and not to
    predict a loss.

    Args:
        steps: Number of steps, T.
        gradient_norm: Bound of the gradients' norm, G.
        learning_rate: η.
        contraction: δ², from 0 on; see `contraction`.

    Returns:
        The bound.

    Raises:
        ConfigError: A number is outside its range.

    Source:
        A survey of gradient compression, "Convergence with compression", expected_error_after_T_steps.
    """
    for name, value in (("steps", steps), ("gradient_norm", gradient_norm), ("learning_rate", learning_rate)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value}; allowed: finite and above 0")
    if not 0 <= contraction < math.inf:
        raise ConfigError(f"contraction={contraction}; allowed: finite and from 0 on")
    return gradient_norm / math.sqrt(steps) + contraction * learning_rate * gradient_norm**2


def table(rows: dict[str, dict[int, float]]) -> str:
    """Format efficiencies as text.

    Args:
        rows: E(P) by the number of workers, by label.

    Returns:
        A line for each label, below the numbers of workers.
    """
    columns: Iterable[int] = next(iter(rows.values())) if rows else ()
    cells = [["E(P), workers:", *map(str, columns)]]
    cells += [[label, *(f"{100 * value:.0f} %" for value in found.values())] for label, found in rows.items()]
    return text_table(cells, text_columns=(0,))

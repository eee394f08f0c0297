"""Communicator `allreduce`."""

import time

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from .._util.scratch import scratch
from ..kernels import max_magnitude, sum_sparse, write_error
from ..kernels.half import fp16_decode, fp16_encode
from ..kernels.topk import NON_FINITE
from ..pipeline.compressor import Compressor
from ..registry import register
from ..sparsifiers.base import Scope
from ..sparsifiers.randomk import scaled
from ..transport.base import Transport
from .base import Communicator, Pending, wait


@register
class Allreduce(Communicator[Pending]):
    """The library's own allreduce of float32 or float16 values: no containers, no decoding.

    It works with dense gradients, and with sparse ones whose positions are the same on all ranks; then only values are sent.
    """

    name = "allreduce"
    collectives = ("allreduce",)
    needs_reducible = True

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: np.ndarray,
        state: tuple[np.ndarray, np.ndarray] | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        if not compressor.dense:
            return _start_sparse(transport, name, compressor, gradient, state, Scope(stream, sizes or (gradient.size,)))
        started = time.perf_counter()
        if state is None and compressor.reducible_dtype == "float32":
            sent = gradient  # it is not needed afterwards
        elif state is None:
            sent = to_reducible(gradient, compressor.reducible_dtype, transport.size)
        else:
            residual, following = state
            with non_finite_allowed():
                np.add(gradient, residual, out=following)
                sent = to_reducible(following, compressor.reducible_dtype, transport.size)
                np.subtract(following, from_reducible(sent), out=following)
        seconds = {"value": time.perf_counter() - started}
        return Pending(transport.allreduce(name, sent), sent.nbytes, seconds)

    def finish(self, pending: Pending, transport: Transport, out: np.ndarray, weight: float) -> bool:
        summed = wait(pending)
        started = time.perf_counter()
        summed = from_reducible(summed)
        if pending.support is None:
            np.multiply(summed, np.float32(weight), out=out)
            finite = max_magnitude(out) < NON_FINITE
        else:
            finite = max_magnitude(summed) < NON_FINITE
            sum_sparse(out, pending.support, summed, np.zeros(1, np.int64), np.array([summed.size]), np.float32(weight))
            if not finite:
                out[:] = np.nan  # also where nothing was sent
        pending.seconds["decode"] = time.perf_counter() - started
        return bool(finite)


def _start_sparse(
    transport: Transport,
    name: str,
    compressor: Compressor,
    gradient: np.ndarray,
    state: tuple[np.ndarray, np.ndarray] | None,
    scope: Scope,
) -> Pending:
    started = time.perf_counter()
    if state is None:
        support, values = compressor.sparsifier.select(gradient, scope)
    else:
        support, values = compressor.sparsifier.select_compensated(gradient, *state, scope)
    selected = time.perf_counter()
    sent = to_reducible(
        scaled(values, gradient.size) if compressor.unbiased else values, compressor.reducible_dtype, transport.size
    )
    if state is not None:
        write_error(state[1], support, values, from_reducible(sent))
    seconds = {"select": selected - started, "value": time.perf_counter() - selected}
    return Pending(transport.allreduce(name, sent), sent.nbytes, seconds, support=support.copy())


def to_reducible(gradient: np.ndarray, dtype: str, ranks: int) -> np.ndarray:
    """Copy values to the dtype in which they will be summed.

    float16 values saturate so that the sum over ranks cannot overflow. If a gradient is not finite, all of it becomes NaN.

    Args:
        gradient: float32[d].
        dtype: "float32" or "float16".
        ranks: Number of ranks.

    Returns:
        float32[d] or float16[d].
    """
    if dtype == "float32":
        return gradient.copy()
    limit = np.float32(0.99 * float(np.finfo(dtype).max) / ranks)  # 1 % for the rounding of the partial sums
    sent = np.empty(gradient.size, dtype)
    if fp16_encode(gradient, limit, sent.view(np.uint16)) >= NON_FINITE:
        sent[:] = np.nan
    return sent


def from_reducible(summed: np.ndarray) -> np.ndarray:
    """Return a sum as float32.

    Args:
        summed: float32[d] or float16[d].

    Returns:
        float32[d]; `summed` itself, or a scratch array of the thread.
    """
    if summed.dtype == np.float32:
        return summed
    values = scratch("decoded fp16", np.float32, summed.size)
    fp16_decode(summed.view(np.uint16), values)
    return values

"""Communicator `allreduce`."""

import time
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..kernels import NON_FINITE, max_magnitude, sum_sparse, write_error
from ..pipeline.compressor import Compressor
from ..registry import register
from ..sparsifiers.base import Scope
from ..sparsifiers.randomk import scaled
from ..transport.base import Transport
from .base import Communicator, Pending, wait
from .places import Placed
from .reducible import from_reducible, to_reducible


@register
class Allreduce(Placed, Communicator[Pending]):
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
        gradient: Any,
        state: tuple | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        if not compressor.dense:
            return _start_sparse(transport, name, compressor, gradient, state, Scope(stream, sizes or (gradient.size,)))
        started = time.perf_counter()
        sent = self.place.to_reducible(gradient, state, compressor.reducible_dtype, transport)
        seconds = {"value": time.perf_counter() - started}
        return Pending(transport.allreduce(name, sent), sent.nbytes, seconds)

    def finish(self, pending: Pending, transport: Transport, out: Any, weight: float) -> bool:
        summed = wait(pending)
        started = time.perf_counter()
        if pending.support is None:
            finite = self.place.write_sum(summed, out, weight)
        else:
            finite = _write_sparse(from_reducible(summed), pending.support, out, np.float32(weight))
        pending.seconds["decode"] = time.perf_counter() - started
        return finite


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


def _write_sparse(summed: np.ndarray, support: np.ndarray, out: np.ndarray, weight: np.float32) -> bool:
    """Write weight * summed at some positions, and zeros elsewhere; NaN everywhere if it is not finite. Returns whether it is."""
    finite = bool(max_magnitude(summed) < NON_FINITE)
    sum_sparse(out, support, summed, np.zeros(1, np.int64), np.array([summed.size]), weight)
    if not finite:
        out[:] = np.nan
    return finite

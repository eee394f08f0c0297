"""The library's own allreduce, of values in float32 or float16: no container, no decoding.

For dense gradients, and for sparse ones whose positions are the same on all ranks: then only the values are sent.
"""

import time

import numpy as np

from .._util.scratch import scratch
from ..kernels import max_magnitude, sum_sparse, write_error
from ..kernels.half import fp16_decode, fp16_encode
from ..kernels.topk import NON_FINITE
from ..pipeline.encoder import scaled
from ..registry import register
from ..sparsifiers.base import Scope
from .base import Communicator, Pending, wait


@register
class Allreduce(Communicator):
    name = "allreduce"
    collectives = ("allreduce",)
    needs_reducible = True

    def start(self, transport, name, compressor, gradient, state, stream, sizes=None):
        if not compressor.dense:
            return _start_sparse(transport, name, compressor, gradient, state, Scope(stream, sizes or (gradient.size,)))
        started = time.perf_counter()
        if state is not None:
            residual, pending = state
            gradient = np.add(gradient, residual, out=pending)
        if state is None and compressor.reducible_dtype == "float32":
            sent = gradient  # nobody needs it afterwards
        else:
            sent = to_linear(gradient, compressor.reducible_dtype, transport.size)
        if state is not None:
            np.subtract(gradient, from_linear(sent), out=pending)
        seconds = {"value": time.perf_counter() - started}
        return Pending(transport.allreduce(name, sent), sent.nbytes, seconds)

    def finish(self, pending, transport, out, weight):
        summed = wait(pending)
        started = time.perf_counter()
        summed = from_linear(summed)
        if pending.support is None:
            np.multiply(summed, np.float32(weight), out=out)
            finite = max_magnitude(out) < NON_FINITE
        else:
            finite = max_magnitude(summed) < NON_FINITE
            sum_sparse(out, pending.support, summed, np.zeros(1, np.int64), np.array([summed.size]), np.float32(weight))
            if not finite:
                out[:] = np.nan  # where nothing was sent as well
        pending.seconds["decode"] = time.perf_counter() - started
        return bool(finite)


def _start_sparse(transport, name, compressor, gradient, state, scope):
    started = time.perf_counter()
    if state is None:
        support, values = compressor.sparsifier.select(gradient, scope)
    else:
        support, values = compressor.sparsifier.select_compensated(gradient, *state, scope)
    selected = time.perf_counter()
    sent = to_linear(
        scaled(values, gradient.size) if compressor.unbiased else values, compressor.reducible_dtype, transport.size
    )
    if state is not None:
        write_error(state[1], support, values, from_linear(sent))
    seconds = {"select": selected - started, "value": time.perf_counter() - selected}
    return Pending(transport.allreduce(name, sent), sent.nbytes, seconds, support=support.copy())


def to_linear(gradient: np.ndarray, dtype: str, ranks: int) -> np.ndarray:
    """A copy of float32[d] in the dtype of the sum. float16 saturates so that the sum of the ranks cannot overflow; a
    gradient that is not finite becomes NaN everywhere."""
    if dtype == "float32":
        return gradient.copy()
    limit = np.float32(0.99 * float(np.finfo(dtype).max) / ranks)  # 1 % for the rounding of the partial sums
    sent = np.empty(gradient.size, dtype)
    if fp16_encode(gradient, limit, sent.view(np.uint16)) >= NON_FINITE:
        sent[:] = np.nan
    return sent


def from_linear(summed: np.ndarray) -> np.ndarray:
    """float32[d] with the same values; a float16 array is decoded into a scratch array of the thread."""
    if summed.dtype == np.float32:
        return summed
    values = scratch("linear", np.float32, summed.size)
    fp16_decode(summed.view(np.uint16), values)
    return values

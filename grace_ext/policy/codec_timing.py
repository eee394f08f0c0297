"""Measures how many bytes a compressor makes of a gradient and how long that takes here: codecs for the cost model."""

import math
import statistics
import time
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..communicators.allreduce import Allreduce
from ..lowrank.matrices import HostMatrices
from ..pipeline import container
from ..pipeline.decoder import decode_sum
from ..transport.base import CollectiveHandle, Transport
from .cost_model import Codec

_REPEATS = 11


class Curve:
    """A curve through measured points (x, y), all positive.

    It is straight between the points in a log-log plot, constant before the first, and after the last proportional to x if
    `grows`, constant otherwise.

    Args:
        points: y by x.
        grows: Whether y grows after the last point.
    """

    def __init__(self, points: dict[float, float], grows: bool = True):
        self._x, self._y = np.array(sorted(points.items()), np.float64).T
        self._grows = grows

    def __call__(self, x: float) -> float:
        inside = float(np.exp(np.interp(math.log(x), np.log(self._x), np.log(self._y))))
        return inside * max(1.0, x / self._x[-1]) if self._grows else inside


def measure_codec(compressor, gradients: list[np.ndarray], slices_of=(1, 4, 16, 64, 256, 1024)) -> Codec:
    """Measure the codec of a compressor with error feedback.

    Times are medians of this thread's processor time, so that they hold on a busy machine too; the copy of a gradient into
    its memory is part of encoding.

    Args:
        compressor: The compressor.
        gradients: Gradients of different ranks, float32[d] each; containers are made of them whole and in slices.
        slices_of: Into how many slices they are cut, which is for how many ranks of `sharded`.

    Returns:
        The codec, interpolated between the sizes of the slices.
    """
    d, many = gradients[0].size, 8
    residual, buffer = _residual(compressor, gradients), np.empty(d, np.float32)
    sizes, encode, first_seconds, seconds_per_container, sum_sizes = {}, {}, {}, {}, {}
    for count in slices_of:
        length = d // count
        if length == 0:
            continue
        starts = np.linspace(0, d - length, min(count, 8)).astype(int)
        made, blobs = [], []
        for number, gradient in enumerate(gradients):
            for start in starts:
                part = slice(start, start + length)
                started = time.thread_time()
                np.copyto(buffer[part], gradient[part])
                encoded = compressor.encode_compensated(buffer[part], residual[part], buffer[part], Stream(step=number))
                made.append(time.thread_time() - started)
                blobs.append(encoded.blob.copy())
        sizes[length], encode[length] = statistics.mean(blob.size for blob in blobs), statistics.median(made)
        one, sums = (_decode_seconds(blobs, length, containers) for containers in (1, many))
        seconds_per_container[length] = max(sums - one, 0.01 * one) / (many - 1)
        first_seconds[length] = max(one - seconds_per_container[length], 0.01 * one)
    summed = np.zeros(d, np.float32)
    for number, gradient in enumerate(gradients, 1):
        sum_sizes[number] = compressor.encode(summed + gradient, Stream(rank=-2)).blob.size
        decode_sum([container.parse(compressor.encode(gradient, Stream(rank=number)).blob, d)], buffer)
        summed += buffer
    growth = Curve({number: size / sum_sizes[1] for number, size in sum_sizes.items()}, grows=False)
    size, encode, first, each = map(Curve, (sizes, encode, first_seconds, seconds_per_container))
    return Codec(
        lambda elements, summed: size(elements) * growth(summed),
        encode,
        lambda elements, containers: first(elements) + containers * each(elements),
    )


def _residual(compressor, gradients, steps=8) -> np.ndarray:
    """Return what error feedback holds after some steps, float32[d]."""
    residual, following = np.zeros((2, gradients[0].size), np.float32)
    for step in range(steps):
        np.copyto(following, gradients[step % len(gradients)])
        compressor.encode_compensated(following, residual, following, Stream(step=step))
        residual, following = following, residual
    return residual


def _decode_seconds(blobs, elements, containers, times=9) -> float:
    out, taken = np.empty(elements, np.float32), []
    for first in range(times):
        chosen = [blobs[(first + i) % len(blobs)] for i in range(containers)]
        started = time.thread_time()
        decode_sum([container.parse(blob, elements) for blob in chosen], out, 0.5)
        taken.append(time.thread_time() - started)
    return statistics.median(taken)


class _Loopback(Transport):
    """A rank alone, whose sum is what it gave."""

    rank, size = 0, 1

    def allreduce(self, name, array):
        return CollectiveHandle.finished(array)


def measure_reducible_codec(compressor, gradient: np.ndarray, times=9) -> Codec:
    """Measure the codec of a compressor whose values communicator "allreduce" sums, without a memory.

    Args:
        compressor: The compressor.
        gradient: float32[d].
        times: Number of measurements, of which the median counts.

    Returns:
        The codec, for buckets of d elements only.
    """
    communicator, transport, taken = Allreduce(), _Loopback(), []
    buffer, out = np.empty((2, gradient.size), np.float32)
    for step in range(times):
        started = time.thread_time()
        np.copyto(buffer, gradient)
        pending = communicator.start(transport, "bucket", compressor, buffer, None, Stream(step=step))
        encoded = time.thread_time()
        communicator.finish(pending, transport, out, 0.5)
        taken.append((encoded - started, time.thread_time() - encoded))
    encode, decode = map(statistics.median, zip(*taken, strict=True))
    return Codec(lambda elements, summed: pending.wire_bytes, lambda elements: encode, lambda elements, containers: decode)


def measure_factors(method: Any, side: int) -> Codec:
    """Measure a low-rank method, without the collectives between its halves.

    Times are the shortest of this thread's processor time; BLAS may use others beside it.

    Args:
        method: The stage of kind "lowrank".
        side: Rows and columns of the square matrices that elements are taken to be in.

    Returns:
        The codec: `encode` computes both factors, `decode` the result and the residual.
    """
    rows, columns, rank = method.factorization((side, side))
    matrix = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    if not rank:  # sent as it is
        return Codec(lambda elements, summed: 4 * elements, lambda elements: 0.0, lambda elements, containers: 0.0)
    p, qt = np.empty((rows, rank), np.float32), np.empty((rank, columns), np.float32)
    out = np.empty(matrix.size, np.float32)
    encode, decode = [], []
    for step in range(_REPEATS):
        started = time.thread_time()
        for _ in range(method.iterations):
            HostMatrices.project(matrix, method.basis(qt if step else None, *qt.shape, Stream(step=step)), p)
            pt = method.orthonormalized(p, Stream(step=step))
            HostMatrices.project_back(pt, matrix, qt)
        made = time.thread_time()
        HostMatrices.expand(pt, qt, np.float32(1), out, qt, matrix.reshape(-1).copy())
        encode.append(made - started)
        decode.append(time.thread_time() - made)
    sent = 4 * method.iterations * rank * (rows + columns) / matrix.size
    codec, result = (min(times[1:]) / matrix.size for times in (encode, decode))
    return Codec(
        lambda elements, summed: sent * elements,
        lambda elements: codec * elements,
        lambda elements, containers: result * elements,
    )

"""The exchange of low-rank factors: dependent allreduces, two for each iteration. The first carries whole tensors as well."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from .._util.rng import Stream
from .._util.shared_states import SharedStates
from ..errors import ConfigError
from ..kernels import NON_FINITE, max_magnitude
from ..lowrank.matrices import HOST, Matrices
from ..pipeline.compressor import Compressor
from ..transport.base import Transport
from .base import Communicator, Pending, wait


class ShapedTensor(Protocol):
    """What a bucket tells of a tensor in it, a grace_ext.exchange.buckets.Tensor."""

    name: str
    size: int
    shape: tuple[int, ...]


@dataclasses.dataclass
class _Part:
    """A tensor: its matrix, and its slices of the bucket and of sums: the first P, Q, and further P. Rank 0: it is sent whole."""

    name: str
    rows: int
    columns: int
    rank: int
    bucket: slice
    first: slice
    second: slice
    further: slice


@dataclasses.dataclass
class _PendingFactors(Pending):
    """An exchange under way.

    gradient: float32[d], with the residual added; it becomes the next residual if `residual` is true. started: number of
    allreduces that were started. first: the first sum once it has arrived. factors: pt of each part, None where the tensor is
    sent as it is; empty if a NaN was found. own: this rank's part of the last sum of Q.
    """

    keeps_state = True
    name: str
    parts: list[_Part]
    gradient: Any
    residual: bool
    stream: Stream
    started: int = 1
    first: np.ndarray | None = None
    factors: list[Any | None] = dataclasses.field(default_factory=list)
    own: Any | None = None


class FactorAllreduce(Communicator[_PendingFactors]):
    """Exchanges one bucket of a low-rank compressor.

    All that follows the sums is computed by IEEE operations in a fixed order, so all ranks end up with the same bits
    whatever their CPUs, as long as the transport's sums are the same bits on all of them. BLAS computes only what is summed
    afterwards.

    Args:
        tensors: The tensors of the bucket, each with `name`, `shape` and `size`.
        compressor: The low-rank compressor.
        warm_starts: The factors that steps start from.
        matrices: Where the gradients lie.
    """

    name = "factors"
    collectives = ("allreduce", "allreduce")

    def __init__(
        self, tensors: Sequence[ShapedTensor], compressor: Compressor, warm_starts: SharedStates, matrices: Matrices = HOST
    ):
        self._given = tensors, compressor, warm_starts
        self._method, self._warm_starts, self._matrices = compressor.lowrank, warm_starts, matrices
        self._factored = _layout(tensors, self._method.factorization)
        self._plain = _layout(tensors, lambda shape: (1, math.prod(shape), 0))
        self._sums = 2 * self._method.iterations
        self.collectives = ("allreduce",) * self._sums

    def at(self, matrices: Matrices) -> "FactorAllreduce":
        """Make the same communicator for gradients that lie somewhere else.

        Args:
            matrices: Where they lie.

        Returns:
            The communicator.
        """
        return FactorAllreduce(*self._given, matrices)

    def check(self, compressor: Compressor) -> None:
        if compressor.lowrank is None:
            raise ConfigError(f"{str(compressor)!r} has no factors")

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: np.ndarray,
        state: tuple[np.ndarray, np.ndarray] | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> _PendingFactors:
        started = time.perf_counter()
        residual, gradient = (None, gradient) if state is None else state
        parts = self._factored if stream.step >= self._method.start else self._plain
        message = self._matrices.empty(parts[-1].first.stop)
        if self._matrices.add(gradient, residual):
            for part in parts:
                self._first(part, gradient[part.bucket], stream, message[part.first])
        else:
            message[:] = np.nan
        sent = self._matrices.to_host(message)
        seconds = {"factor": time.perf_counter() - started}
        return _PendingFactors(
            transport.allreduce(f"{name}.p", sent), sent.nbytes, seconds, name, parts, gradient, state is not None, stream
        )

    def _first(self, part: _Part, gradient: Any, stream: Stream, out: Any) -> None:
        if not part.rank:
            out[:] = gradient
            return
        qt = self._warm_start_of(part) if self._method.warm_start else None
        self._project(part, gradient, qt, stream, out)

    def _project(self, part: _Part, gradient: Any, qt: np.ndarray | None, stream: Stream, out: Any) -> None:
        basis = self._method.basis(qt, part.rank, part.columns, _common(stream, part))
        matrix = gradient.reshape(part.rows, part.columns)
        self._matrices.project(matrix, self._matrices.place(basis), out.reshape(part.rows, part.rank))

    def _warm_start_of(self, part: _Part) -> np.ndarray | None:
        found = self._warm_starts.get(part.name, part.rank * part.columns)
        return None if found is None else found.reshape(part.rank, part.columns)

    def advance(self, pending: _PendingFactors, transport: Transport) -> None:
        if pending.started == self._sums:
            return
        if not pending.parts[-1].second.stop:  # nothing but whole tensors
            pending.first, pending.started = wait(pending), self._sums
            pending.factors = [None] * len(pending.parts)
            return
        summed = wait(pending)
        started = time.perf_counter()
        begin = self._begin_q if pending.started % 2 else self._begin_p
        message, letter = begin(pending, summed), "q" if pending.started % 2 else "p"
        # After a NaN as well, so that no rank can wait in vain.
        round_number = "" if pending.started < 2 else str(pending.started // 2 + 1)
        pending.handle = transport.allreduce(f"{pending.name}.{letter}{round_number}", message)
        pending.started += 1
        pending.wire_bytes += message.nbytes
        pending.seconds["factor"] += time.perf_counter() - started

    def _begin_q(self, pending: _PendingFactors, summed: np.ndarray) -> np.ndarray:
        """Return this rank's part of Q. summed: that of P, float32[n]."""
        if pending.first is None:
            pending.first = summed
        message = self._matrices.empty(pending.parts[-1].second.stop)
        message[:] = np.nan
        pending.factors = []
        if max_magnitude(summed) < NON_FINITE:
            for part in pending.parts:
                p = summed[part.first if summed is pending.first else part.further]
                pending.factors.append(self._second(part, pending, p, message[part.second]))
        sent = self._matrices.to_host(message)
        pending.own = message.copy() if sent is message else message  # the transport may write to what is sent
        return sent

    def _second(self, part: _Part, pending: _PendingFactors, p: np.ndarray, out: Any) -> Any | None:
        if not part.rank:
            return None
        own = self._method.orthonormalized(p.reshape(part.rows, part.rank), _common(pending.stream, part))
        pt, matrix = self._matrices.place(own), pending.gradient[part.bucket].reshape(part.rows, part.columns)
        self._matrices.project_back(pt, matrix, out.reshape(part.rank, part.columns))
        return pt

    def _begin_p(self, pending: _PendingFactors, summed: np.ndarray) -> np.ndarray:
        """Return this rank's part of the next P. summed: that of Q, float32[n]."""
        message = self._matrices.empty(pending.parts[-1].further.stop)
        message[:] = np.nan
        if pending.factors and max_magnitude(summed) < NON_FINITE:
            for part in (part for part in pending.parts if part.rank):
                qt = summed[part.second].reshape(part.rank, part.columns)
                self._project(part, pending.gradient[part.bucket], qt, pending.stream, message[part.further])
        return self._matrices.to_host(message)

    def finish(self, pending: _PendingFactors, transport: Transport, out: np.ndarray, weight: float) -> bool:
        while pending.started < self._sums:
            self.advance(pending, transport)
        second = wait(pending) if pending.parts[-1].second.stop else np.empty(0, np.float32)
        started = time.perf_counter()
        finite = bool(pending.factors) and max_magnitude(second) < NON_FINITE
        if finite:
            found = [
                self._decode(part, pt, pending, second, transport.size, np.float32(weight), out[part.bucket])
                for part, pt in zip(pending.parts, pending.factors, strict=True)
            ]
            finite = self._matrices.all_finite(found)
        if not finite:
            out[:] = np.nan
        pending.seconds["decode"] = time.perf_counter() - started
        return bool(finite)

    def _decode(
        self,
        part: _Part,
        pt: Any | None,
        pending: _PendingFactors,
        second: np.ndarray,
        ranks: int,
        weight: np.float32,
        out: Any,
    ) -> Any:
        """Write a tensor's result and residual; returns what Matrices.all_finite can tell of the result.

        The residual is what this rank's own factors leave out. Its mean over ranks, on which all that is sent depends,
        equals that of the usual residual, gradient minus result. But the latter also holds how the rank's gradients differ
        from the mean, which is never sent by anybody: a random walk that grows without end, and that is lost with the rank.
        """
        residual = pending.gradient[part.bucket] if pending.residual else pending.gradient[:0]
        if not part.rank:
            residual[:] = 0
            return self._matrices.write(out, pending.first[part.first] * weight)
        qt = second[part.second].reshape(part.rank, part.columns)
        if self._method.warm_start:
            self._warm_starts.put(part.name, qt * np.float32(1 / ranks))
        own = pending.own[part.second].reshape(qt.shape)
        return self._matrices.expand(pt, self._matrices.place(qt), weight, out, own, residual)


def _common(stream: Stream, part: _Part) -> Stream:
    """Return the stream of a tensor's factors, the same on all ranks."""
    return Stream(stream.seed, part.name, stream.step).shared()


def _layout(tensors: Sequence[ShapedTensor], matrix: Callable[[tuple[int, ...]], tuple[int, int, int]]) -> list[_Part]:
    """Lay out the parts; matrix(shape) -> (rows, columns, rank)."""
    parts, bucket, first, second, further = [], 0, 0, 0, 0
    for tensor in tensors:
        rows, columns, rank = matrix(tensor.shape)
        starts = bucket, first, second, further
        ends = bucket + tensor.size, first + (rows * rank or tensor.size), second + columns * rank, further + rows * rank
        parts.append(_Part(tensor.name, rows, columns, rank, *map(slice, starts, ends)))
        bucket, first, second, further = ends
    return parts

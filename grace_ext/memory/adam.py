"""Memory `adam`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from .._util.shared_states import SharedStates
from ..communicators.factors import ShapedTensor
from ..errors import ConfigError
from ..kernels.accumulate import STREAMED
from ..kernels.second_moment import LANES, accumulate_and_sketch, add_squares, spread_root, sum_ratio_squares
from ..pipeline.compressor import Compressor
from ..registry import register
from .base import Memory
from .momentum import Momentum
from .residual import Residual

#: The field of its states that are the same on all ranks.
SECOND_MOMENT = "second_moment"
# In a state: where its numbers are, and where the sums of rows and columns begin.
_MEAN, _WEIGHT, _RATE, _SUMS = 0, 1, 2, 3
_LEAST_FALL, _LARGEST_FALL = 1.01, 10.0  # of the learning rate, that residuals follow at once


@register
class Adam(Momentum):
    """Compressed momentum for Adam and AdamW, with a second moment that sees the whole gradient of the step.

    What is compressed, with error feedback, is each rank's first moment, as with memory "momentum". What differs is the
    optimizer's step. With s the mean of what the ranks sent, a matrix (a tensor's first dimension and all others), it is

        p = p - lr * s / (sqrt(v) + eps)
        v[i, j] = V * share(R[i] / mean(R)) * share(C[j] / mean(C)),   share(x) = (x + smoothing) / (1 + smoothing)

    with V the moving average of the mean square of the mean gradient, R and C those of the sums of s**2 in each row and
    column. Where the root mean square of s / sqrt(v) is above `clip`, s is cut down to that.

    V comes from 8 numbers of each tensor, a random projection that ranks sum beside what they send. So a step in which the
    gradients of all ranks are large is a small one at once. The arrivals s cannot tell that: they lag behind, and in tensors
    whose residuals still grow there are too few. Where gradients are clipped between the exchange and the step, V is that of
    what is left, as in Adam. Where the learning rate falls, what waits in the residual would be worth less than when it was
    computed, so that a training with a decaying rate ends with updates that never came: the residual grows by as much as the
    rate falls, in steps of at least 1 %. Gradients whose squares are not finite make no step. Tensors whose elements are all sent in each
    step, in fewer bits, and tables whose gradients come as rows, have memory "residual" and Adam's own step.

    Args:
        momentum: Factor of the first moment, from 0 to below 1. Less than Adam's usual 0.9, because the residual delays what
            it holds, and both delays add up.
        decay: Factor of the residual after each step, above 0 and at most 1.
        beta2: Factor of the moving averages of the second moment, above 0 and below 1.
        smoothing: How much of the mean is mixed into the shares of rows and columns, above 0.
        clip: The largest root mean square of a tensor's update before it is multiplied with the learning rate, above 0.

    Source:
        The factored second moment and the clipping of updates: Shazeer and Stern, Adafactor, ICML 2018, sections 3 and 6. A
        residual in units of updates: Karimireddy et al., Error feedback fixes SignSGD, ICML 2019, algorithm 1. The
        sketch: Alon, Matias and Szegedy, The space complexity of approximating the frequency moments, STOC 1996, section 2.2.
        For the rest see "momentum".
    """

    name = "adam"
    needs_step = True

    def __init__(
        self, momentum: float = 0.5, decay: float = 1.0, beta2: float = 0.95, smoothing: float = 0.02, clip: float = 1.0
    ):
        super().__init__(momentum, decay)
        if not 0 < beta2 < 1:
            raise ConfigError(f"adam: beta2={beta2}; allowed: above 0 and below 1")
        for option, value in (("smoothing", smoothing), ("clip", clip)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"adam: {option}={value}; allowed: finite and above 0")
        self.beta2, self.smoothing, self.clip = beta2, smoothing, clip
        self._second = SharedStates()
        self.shared = {SECOND_MOMENT: self._second}
        self._tensors: dict[str, Sequence[ShapedTensor]] = {}  # by bucket
        self._places: dict[str, tuple[str, slice]] = {}  # by tensor: its bucket, and where in it
        self._squares: dict[str, np.ndarray] = {}  # by bucket: mean squares of the mean gradient, float32[tensors]
        self._last: dict[str, _Arrived] = {}  # by tensor
        self._residual_only = Residual(decay)

    def check_optimizer(
        self, optimizer: str, momentum: float, kind: str | None, options: Mapping[str, Any] | None = None
    ) -> None:
        if kind != self.name:
            raise ConfigError(
                f"memory {str(self)!r} needs an optimizer whose step it can change: Adam or AdamW, not inside of another "
                f"optimizer, and not {optimizer}"
            )

    def for_compressor(self, compressor: Compressor) -> Memory:
        return self._residual_only if compressor.dense and not compressor.exact else super().for_compressor(compressor)

    def for_rows(self) -> Memory:
        return self._residual_only

    def set_tensors(self, name: str, tensors: Sequence[ShapedTensor]) -> None:
        self._tensors[name] = tensors
        start = 0
        for tensor in tensors:
            self._places[tensor.name] = name, slice(start, start + tensor.size)
            start += tensor.size

    def shared_size(self, tensor: ShapedTensor) -> int:
        return _SUMS + sum(_matrix(tensor))

    def sketch_size(self, tensors: int) -> int:
        return LANES * tensors

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream
    ) -> tuple[np.ndarray, np.ndarray]:
        velocity, following = self._first_moment.begin_step(name, out.size)
        sketches = np.empty((len(parts), LANES), np.float32)
        low, high = map(np.uint32, stream.shared().key())
        momentum, share = np.float32(self.momentum), np.float32(1 - self.momentum)
        start, streamed = 0, out.size >= STREAMED
        for gradient, sketch in zip(parts, sketches, strict=True):
            at = slice(start, start + gradient.size)
            accumulate_and_sketch(velocity[at], gradient, momentum, share, following[at], low, high, sketch, streamed)
            start += gradient.size
        return following, sketches.reshape(-1)

    def on_sketch(self, name: str, mean: np.ndarray) -> None:
        sizes = np.array([max(tensor.size, 1) for tensor in self._tensors[name]], np.float32)
        with non_finite_allowed():
            self._squares[name] = np.square(mean.reshape(-1, LANES)).cumsum(axis=1)[:, -1] / sizes

    def on_received(self, name: str, out: np.ndarray, scale: float) -> None:
        start = 0
        beta2 = np.float32(self.beta2)
        for tensor, square in zip(self._tensors[name], self._squares.pop(name), strict=True):
            part = out[start : start + tensor.size]
            rows, _ = _matrix(tensor)
            found = self._second.get(tensor.name, self.shared_size(tensor))
            state = np.zeros(self.shared_size(tensor), np.float32) if found is None else found.copy()
            sums = state[_SUMS:]
            largest = add_squares(part, beta2, sums[:rows], sums[rows:])
            added = (np.float32(1) - beta2) * np.array([square, 1], np.float32)
            state[:_RATE] = beta2 * state[:_RATE] + added
            start += tensor.size
            if not np.isfinite(state).all():  # the squares do not fit float32
                continue
            self._second.put(tensor.name, state)
            squares = sum_ratio_squares(part, *self._spread(sums[:rows], sums[rows:]))
            value = part[largest] if largest >= 0 else np.float32(0)
            self._last[tensor.name] = _Arrived(largest, value, added[_MEAN], squares / max(tensor.size, 1))

    def _spread(self, *sums: np.ndarray) -> list[np.ndarray]:
        """The roots of the shares of rows and columns, around 1."""
        roots = [np.empty_like(one) for one in sums]
        for one, root in zip(sums, roots, strict=True):
            spread_root(one, np.float32(self.smoothing), root)
        return roots

    def denominator(
        self, tensor: ShapedTensor, element_at: Callable[[int], float], rate: float
    ) -> tuple[np.ndarray, np.ndarray]:
        (rows, columns), arrived = _matrix(tensor), self._last.pop(tensor.name, None)
        state = self._second.get(tensor.name, self.shared_size(tensor))
        if state is None or arrived is None:  # nothing has arrived in this step
            return np.full(rows, np.inf, np.float32), np.ones(columns, np.float32)
        clipped = np.float32(element_at(arrived.position)) / arrived.value if arrived.value else np.float32(1)
        state[_MEAN] += (clipped * clipped - np.float32(1)) * arrived.added
        root = np.sqrt(state[_MEAN] / state[_WEIGHT])
        update = np.float32(abs(clipped) * math.sqrt(arrived.relative_square)) / root if root else np.float32(0)
        self._follow_rate(tensor.name, state, rate)
        by_row, by_column = self._spread(state[_SUMS : _SUMS + rows], state[_SUMS + rows :])
        return by_row * (root * max(np.float32(1), update / np.float32(self.clip))), by_column

    def _follow_rate(self, tensor: str, state: np.ndarray, rate: float) -> None:
        """Let the tensor's residual grow by as much as the learning rate has fallen."""
        before = float(state[_RATE])
        if rate <= 0 or before / _LEAST_FALL < rate <= before:
            return
        state[_RATE] = rate
        if rate < before:
            bucket, part = self._places[tensor]
            residual = self._residual.find(bucket, sum(one.size for one in self._tensors[bucket]))
            if residual is not None:
                residual[part] *= np.float32(min(before / rate, _LARGEST_FALL))

    def commit(self) -> None:
        super().commit()
        self._second.commit()

    def rollback(self) -> None:
        super().rollback()
        self._second.rollback()
        self._squares.clear()
        self._last.clear()


@dataclasses.dataclass
class _Arrived:
    """What there is to know of a tensor's part of a result.

    position and value: of the largest magnitude. added: what the step added to V. relative_square: the mean square of s over
    the roots of the shares of rows and columns.
    """

    position: int
    value: np.float32
    added: np.float32
    relative_square: float


def _matrix(tensor: ShapedTensor) -> tuple[int, int]:
    """The tensor's rows and columns."""
    rows = tensor.shape[0] if tensor.size else 0
    return rows, tensor.size // max(rows, 1)

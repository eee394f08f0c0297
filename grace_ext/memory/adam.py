"""Memory `adam`."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from .._util.shared_states import SharedStates
from ..communicators.factors import ShapedTensor
from ..errors import ConfigError
from ..kernels.momentum import hold_back
from ..kernels.second_moment import LANES, largest_in_rows, largest_in_rows_at, root_moments, square_sums_at, update_moments
from ..pipeline.compressor import Compressor
from ..pipeline.square_sums import SquareSums
from ..registry import register
from ..sparsifiers.base import NO_VALUES
from ..sparsifiers.parts import SketchedParts
from ._by_tensor import ResidualByTensor
from .arrays import Arrays
from .base import Memory
from .residual import Residual
from .states import States

# In a state: where the learning rate is, and where the sums of rows and columns begin; see the kernel update_moments.
_RATE, _SUMS = 2, 3
_DELAY = 9.0  # of the first moment where everything is sent, in steps
_SPARSE = 0.05  # there is no first moment at densities below it
_LEAST_FALL = 1.01  # of the learning rate, that residuals follow


@register
class Adam(ResidualByTensor):
    """Error feedback for Adam and AdamW, with a second moment that sees the whole gradient of the step.

    What is compressed is each rank's gradient and its residual. What differs is the optimizer's step. With s the mean of what
    the ranks sent, a matrix (a tensor's first dimension and all others), it is

        p = p - lr * s / (sqrt(v) + eps)
        v[i, j] = V * share(R[i] / mean(R)) * share(C[j] / mean(C)),   share(x) = (x + smoothing) / (1 + smoothing)

    with V the moving average of the mean square of the mean gradient, R and C those of the sums of s**2 in each row and
    column. Where the root mean square of s / sqrt(v) is above `clip`, s is cut down to that; what it is comes from the sums of
    rows and columns, as v does. At low densities there is no first moment: an element is sent as the sum of the gradients since
    it was last sent, which averages as a momentum does, and a momentum before or after would add its own delay to that of the
    residual. The more of the elements is sent in a step, the less there is to average. So from a density of 5 % on, that of
    the spec whatever a schedule makes of it, what goes to the residual is a first moment with a mean delay of 9 times the
    density, in steps. In steps in which communicator "auto" sends everything that is 9, as with Adam's usual factor of 0.9;
    the factor is delay / (1 + delay). What the first moment still holds when such steps end goes to the residual then.

    V comes from 8 numbers of each tensor, a random projection that ranks sum beside what they send. So a step in which the
    gradients of all ranks are large is a small one at once. The arrivals s cannot tell that: they lag behind, and in tensors
    whose residuals still grow there are too few. Where gradients are clipped between the exchange and the step, V is that of
    what is left, as in Adam. Where the learning rate falls, what waits in the residual would be worth less than when it was
    computed, so that a training with a decaying rate ends with updates that never came: the residual grows by as much as the
    rate falls, in steps of at least 1 %. Gradients whose squares are not finite make no step. Tensors whose elements are all
    sent in each step, in fewer bits, and tables whose gradients come as rows, have memory "residual" and Adam's own step.

    Args:
        decay: Factor of the residual after each step, above 0 and at most 1.
        beta2: Factor of the moving averages of the second moment, above 0 and below 1.
        smoothing: How much of the mean is mixed into the shares of rows and columns, above 0.
        clip: The largest root mean square of a tensor's update before it is multiplied with the learning rate, above 0. Adafactor
            has 1. Here an element is sent as the sum of several steps' gradients, which is larger without being an outlier.
        bits: Bits in which an element of the residual is kept; see Residual. What a first moment holds has 32.

    Source:
        The factored second moment and the clipping of updates: Shazeer and Stern, Adafactor, ICML 2018, sections 3 and 6. A
        residual in units of updates: Karimireddy et al., Error feedback fixes SignSGD, ICML 2019, algorithm 1. The
        sketch: Alon, Matias and Szegedy, The space complexity of approximating the frequency moments, STOC 1996, section 2.2.
    """

    name = "adam"
    supports_rows = False
    summed_fields = frozenset({"residual", "held"})
    has_hooks = True
    corrects_gradient = True
    receives_at_positions = True
    hooks_work_dense = True
    applies_momentum = True
    needs_step = True

    def __init__(self, decay: float = 1.0, beta2: float = 0.95, smoothing: float = 0.02, clip: float = 2.0, bits: int = 32):
        super().__init__(decay, bits)
        if not 0 < beta2 < 1:
            raise ConfigError(f"adam: beta2={beta2}; allowed: above 0 and below 1")
        for option, value in (("smoothing", smoothing), ("clip", clip)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"adam: {option}={value}; allowed: finite and above 0")
        self.beta2, self.smoothing, self.clip = beta2, smoothing, clip
        #: What the first moment has taken up of the gradients and not yet given to the residual.
        self._held = States("what the first moment holds")
        self._given_up: list[str] = []  # names whose states end with the step
        self.states = {**self.states, "held": self._held}
        self._second = SharedStates()
        self.shared = {"second_moment": self._second}
        self._matrices: dict[str, np.ndarray] = {}  # by bucket: rows and columns of its tensors, int64[tensors, 2]
        self._squares: dict[str, np.ndarray] = {}  # by bucket: mean squares of the mean gradient, float32[tensors]
        self._sums: dict[str, SquareSums] = {}  # by bucket: of the result
        self._last: dict[str, _Arrived] = {}  # by tensor
        self._residual_only = Residual(decay, bits)

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
        return self._residual_only.for_rows()

    def set_tensors(self, name: str, tensors: Sequence[ShapedTensor]) -> None:
        super().set_tensors(name, tensors)
        self._matrices[name] = np.array([_matrix(tensor) for tensor in tensors], np.int64)

    def shared_size(self, tensor: ShapedTensor) -> int:
        return _SUMS + sum(_matrix(tensor))

    def sketch_size(self, tensors: int) -> int:
        return LANES * tensors

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        raise ConfigError("memory 'adam' is a part of the optimizer's step: use it in an exchange, or memory 'residual'")

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray | list[np.ndarray], SketchedParts]:
        sketched, holds = SketchedParts(parts, *map(np.uint32, stream.shared().key())), density >= _SPARSE
        held, following = self._held.begin(name, out.size) if holds else (self._give_up(name, out.size), NO_VALUES)
        if held is None:
            return sketched, sketched
        sketched.complete()
        start, share = 0, np.float32(_DELAY * density / (1 + _DELAY * density))
        for gradient in parts:
            at = slice(start, start + gradient.size)
            start = at.stop
            if holds:
                hold_back(held[at], gradient, share, following[at], out[at])
            else:
                with non_finite_allowed():
                    np.add(gradient, held[at], out=out[at])
        return out, sketched

    def works_at_positions(self, compressor: Compressor) -> bool:
        return compressor.density < _SPARSE and compressor.transform is None

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        held = self._give_up(name, len(gradient))
        if held is not None:
            gradient += arrays.from_host(held)

    def _give_up(self, name: str, size: int) -> np.ndarray | None:
        """What the first moment still holds where there is none any more, float32[size]."""
        held = self._held.find(name, size)
        if held is not None:
            self._given_up.append(name)
        return held

    def on_sketch(self, name: str, mean: np.ndarray) -> None:
        sizes = np.maximum(self._matrices[name].prod(axis=1), 1).astype(np.float32)
        with non_finite_allowed():
            self._squares[name] = np.square(mean.reshape(-1, LANES)).cumsum(axis=1)[:, -1] / sizes

    def square_sums(self, name: str) -> SquareSums:
        self._sums[name] = SquareSums(self._matrices[name])
        return self._sums[name]

    def on_received(self, name: str, out: np.ndarray, scale: float) -> None:
        self._update(name, self._sums.pop(name).of(out), functools.partial(largest_in_rows, out))

    def on_received_at(self, name: str, at: np.ndarray, values: np.ndarray, scale: float) -> float:
        sums = np.empty(int(self._matrices[name].sum()), np.float32)
        square_sums_at(at, values, self._matrices[name], sums)
        self._update(name, sums, functools.partial(largest_in_rows_at, at, values))
        return 1.0

    def _update(self, name: str, sums: np.ndarray, find_largest: Callable) -> None:
        """sums: what SquareSums has of the result. find_largest: the kernel largest_in_rows for the result."""
        tensors, shapes, squares = self._tensors[name], self._matrices[name], self._squares.pop(name)
        sizes = (_SUMS + shapes.sum(axis=1)).tolist()
        before = [self._second.get(tensor.name, size) for tensor, size in zip(tensors, sizes, strict=True)]
        states = np.concatenate(
            [np.zeros(size, np.float32) if state is None else state for state, size in zip(before, sizes, strict=True)]
        )
        finite, relative, beta2 = np.empty(len(tensors), np.bool_), np.empty(len(tensors)), np.float32(self.beta2)
        rows, positions = np.empty((2, len(tensors)), np.int64)
        values = np.empty(len(tensors), np.float32)
        starts = np.cumsum([0, *sizes[:-1]])
        kept, added = beta2 * states[starts], (np.float32(1) - beta2) * squares
        update_moments(shapes, sums, squares, beta2, self.smoothing, states, finite, rows, relative)
        find_largest(shapes, rows, positions, values)
        at = 0
        described = zip(*(found.tolist() for found in (positions, values, kept, added, relative)), strict=True)
        for tensor, size, fits, arrived in zip(tensors, sizes, finite.tolist(), described, strict=True):
            if fits:  # else the squares do not fit float32
                self._second.put(tensor.name, states[at : at + size])
                self._last[tensor.name] = _Arrived(*arrived)
            at += size

    def element_needed(self, tensor: ShapedTensor) -> int:
        arrived = self._last.get(tensor.name)
        return 0 if arrived is None else arrived.position

    def denominator(
        self, tensor: ShapedTensor, element_at: Callable[[int], float], rate: float
    ) -> tuple[np.ndarray, np.ndarray]:
        (rows, columns), arrived = _matrix(tensor), self._last.pop(tensor.name, None)
        state = self._second.get(tensor.name, _SUMS + rows + columns)
        if state is None or arrived is None:  # nothing has arrived in this step
            return np.full(rows, np.inf, np.float32), np.ones(columns, np.float32)
        clipped = element_at(arrived.position) / arrived.value if arrived.value else 1.0
        roots = np.empty(rows + columns, np.float32)
        root_moments(
            state, rows, clipped, arrived.relative_square, arrived.kept, arrived.added, self.smoothing, self.clip, roots
        )
        self._follow_rate(tensor.name, state, rate)
        return roots[:rows], roots[rows:]

    def _follow_rate(self, tensor: str, state: np.ndarray, rate: float) -> None:
        """Let the tensor's residual grow by as much as the learning rate has fallen."""
        before = state.item(_RATE)
        if rate <= 0 or before / _LEAST_FALL < rate <= before:
            return
        state[_RATE] = rate
        if rate < before:
            self._rescale(tensor, before, rate)

    def commit(self) -> None:
        super().commit()
        self._held.commit()
        for name in self._given_up:
            self._held.drop(name)
        self._given_up.clear()
        self._second.commit()

    def rollback(self) -> None:
        super().rollback()
        self._given_up.clear()
        self._second.rollback()
        self._squares.clear()
        self._sums.clear()
        self._last.clear()


class _Arrived(NamedTuple):
    """What there is to know of a tensor's part of a result.

    position and value: of an element that is large. kept, added, relative_square: see the kernels root_moments and
    update_moments.
    """

    position: int
    value: float
    kept: float
    added: float
    relative_square: float


def _matrix(tensor: ShapedTensor) -> tuple[int, int]:
    """The tensor's rows and columns."""
    rows = tensor.shape[0] if tensor.size else 0
    return rows, tensor.size // max(rows, 1)

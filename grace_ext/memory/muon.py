"""Memory `muon`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from .._util.shared_states import SharedStates
from ..communicators.factors import ShapedTensor
from ..errors import ConfigError
from ..kernels.momentum import accumulate_momentum
from ..pipeline.compressor import Compressor
from ..registry import register
from ._by_tensor import ResidualByTensor
from .arrays import Arrays, NumpyArrays
from .base import Memory
from .velocity import Velocity

#: What torch.optim.Muon has by default; the memory has no options for them.
COEFFICIENTS, EPS = (3.4445, -4.775, 2.0315), 1e-7
#: The factors of an update of n x m: torch.optim.Muon's adjust_lr_fn.
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
_CHANGED = 1e-3  # the relative difference from which an update has been changed on its way to the step


@register
class Muon(ResidualByTensor):
    """Muon's updates instead of gradients: each rank orthogonalizes its own momentum, and error feedback is in parameters.

    With m the momentum of a rank, m = momentum · m + (1 - momentum) · g, O the orthogonalized matrix of m (with Nesterov, of
    momentum · m + (1 - momentum) · g), times the factor of its shape, and e the residual: e + O is compressed and sent, e
    keeps what was not, and with s the mean of what the ranks sent the step is p = p - lr · (s + weight_decay · p).

    Muon's step does not depend on the scale of what it gets, and gives all directions the same weight, so that what is left
    out of a gradient is not made up for by sending it later: the residual of gradients has no unit in which it is a step. The
    residual of updates has, if they are linear in what is sent. What waits is a step in units of the learning rate, so it
    changes by as much as the rate does. The mean of the ranks' orthogonalized matrices takes the place of the orthogonalized
    mean.

    The optimizer is torch.optim.Muon with the same options. Gradients are updates between the exchange and the step, and
    must stay as they are: what else clips or unscales them makes the step raise ConfigError. Muon's own state stays that of
    a parameter without steps. Tensors that are sent exactly have no memory, and Muon's own step.

    Args:
        momentum: Muon's, from 0 to below 1.
        nesterov: Muon's.
        steps: Number of Newton-Schulz iterations, Muon's ns_steps, 1 to 99.
        adjust: "original" or "match_rms_adamw", Muon's adjust_lr_fn.
        decay: Factor of the residual after each step, above 0 and at most 1.
        bits: Bits in which an element of the residual is kept; see Residual.

    Source:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024. Error feedback of Muon's updates of
        each rank: Thérien et al., MuLoCo: Muon is a practical inner optimizer for DiLoCo, arXiv 2505.23725, of which this is
        the case of one local step without an outer momentum. A residual in units of updates: Karimireddy et al., Error
        feedback fixes SignSGD, ICML 2019, algorithm 1.
    """

    name = "muon"
    supports_rows = False
    has_hooks = True
    corrects_gradient = True
    receives_at_positions = True
    hooks_work_dense = True
    applies_momentum = True
    needs_step = True
    residual_is_of_gradients = False

    def __init__(
        self,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        adjust: str = "original",
        decay: float = 1.0,
        bits: int = 32,
    ):
        super().__init__(decay, bits)
        if not 0 <= momentum < 1:
            raise ConfigError(f"muon: momentum={momentum}; allowed: from 0 to below 1")
        if not 1 <= steps <= 99:
            raise ConfigError(f"muon: steps={steps}; allowed: 1 to 99")
        if adjust not in ADJUSTMENTS:
            raise ConfigError(f"muon: adjust={adjust!r}; allowed: {', '.join(ADJUSTMENTS)}")
        self.momentum, self.nesterov, self.steps, self.adjust = momentum, nesterov, steps, adjust
        self._average = Velocity(momentum, 1 - momentum)
        self.states = {**self.states, **self._average.states}
        self._rates = SharedStates()  # the learning rate that a tensor's residual is in units of
        self.shared = {"rate": self._rates}
        self._last: dict[str, tuple[int, np.float32]] = {}  # by tensor: the largest magnitude that has arrived, and where

    def check_optimizer(
        self, optimizer: str, momentum: float, kind: str | None, options: Mapping[str, Any] | None = None
    ) -> None:
        if kind != self.name:
            raise ConfigError(
                f"memory {str(self)!r} makes the steps of torch.optim.Muon, not inside of another optimizer, and not those "
                f"of {optimizer}"
            )
        wanted = spec_of(options or {})
        own = f"muon:{self.momentum:g}:nesterov={self.nesterov}:steps={self.steps}:adjust={self.adjust}".lower()
        if wanted is None:
            raise ConfigError(f"memory {str(self)!r}: Muon has to have ns_coefficients={COEFFICIENTS} and eps={EPS}")
        if wanted != own:
            raise ConfigError(f"memory {own!r} and the options of {optimizer} differ: use {wanted!r}")

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        raise ConfigError("memory 'muon' changes with each step: use it in an exchange, or memory 'residual'")

    def for_rows(self) -> Memory:
        raise ConfigError("memory 'muon' is for matrices, not for gradients that come as rows: use sparse_as_dense=True")

    def shared_size(self, tensor: ShapedTensor) -> int:
        return 1

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray, None]:
        velocity, following = self._average.begin_step(name, out.size)
        momentum, share = np.float32(self.momentum), np.float32(1 - self.momentum)
        with non_finite_allowed():
            for tensor, gradient in zip(self._tensors[name], parts, strict=True):
                at = self._places[tensor.name][1]
                accumulate_momentum(velocity[at], gradient, momentum, share, following[at])
                out[at] = self._update(tensor, gradient, following[at], NumpyArrays)
        return out, None

    def works_at_positions(self, compressor: Compressor) -> bool:
        return not compressor.dense and compressor.transform is None

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        velocity, following = self._average.begin_step(name, len(gradient), arrays)
        following[:] = velocity * self.momentum + gradient * (1 - self.momentum)
        for tensor in self._tensors[name]:
            at = self._places[tensor.name][1]
            gradient[at] = self._update(tensor, gradient[at], following[at], arrays)

    def _update(self, tensor: ShapedTensor, gradient: Any, momentum: Any, arrays: Arrays) -> Any:
        """A tensor's update, float32[d], of its gradient and its new momentum; all are arrays of that kind."""
        update = momentum * self.momentum + gradient * (1 - self.momentum) if self.nesterov else momentum
        rows = tensor.shape[0] if tensor.size and tensor.shape else 1
        matrix = update.reshape(rows, -1)
        factor = ADJUSTMENTS[self.adjust](rows, max(matrix.shape[1], 1))
        return (orthogonalized(matrix, self.steps, arrays) * factor).reshape(-1)

    def on_received(self, name: str, out: np.ndarray, scale: float) -> None:
        if scale != 1:
            out *= np.float32(1 / scale)  # a step is the mean, as Muon's is the same for the sum
        for tensor in self._tensors[name]:
            part = out[self._places[tensor.name][1]]
            largest = int(np.abs(part).argmax()) if part.size else 0
            self._last[tensor.name] = largest, part[largest] if part.size else np.float32(0)

    def on_received_at(self, name: str, at: np.ndarray, values: np.ndarray, scale: float) -> float:
        for tensor in self._tensors[name]:
            place = self._places[tensor.name][1]
            own = slice(*np.searchsorted(at, [place.start, place.stop]))
            largest = int(np.abs(values[own]).argmax()) if values[own].size else -1
            found = (int(at[own][largest]) - place.start, values[own][largest]) if largest >= 0 else (0, np.float32(0))
            self._last[tensor.name] = found[0], found[1] * np.float32(1 / scale)
        return 1 / scale

    def element_needed(self, tensor: ShapedTensor) -> int:
        return self._last.get(tensor.name, (0, np.float32(0)))[0]

    def denominator(
        self, tensor: ShapedTensor, element_at: Callable[[int], float], rate: float
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = tensor.shape[0]
        position, value = self._last.pop(tensor.name, (0, np.float32(0)))
        if value and not abs(element_at(position) / value - 1) < _CHANGED:
            raise ConfigError(
                f"the gradient of {tensor.name!r} holds an update of Muon's by memory 'muon', and was changed between the "
                f"exchange and the step, from {value:g} to {element_at(position):g}: clip gradients of other parameters "
                f"only, and tell the wrapper of the GradScaler (grad_scaler=)"
            )
        self._follow_rate(tensor.name, rate)
        return np.ones(rows, np.float32), np.ones(tensor.size // max(rows, 1), np.float32)

    def _follow_rate(self, tensor: str, rate: float) -> None:
        """Let what waits stay the same step in parameters when the learning rate changes."""
        state = self._rates.get(tensor, 1)
        before = 0.0 if state is None else float(state[0])
        if rate <= 0 or np.float32(rate) == before:
            return
        self._rates.put(tensor, np.array([rate], np.float32))
        self._rates.commit()
        if before:
            self._rescale(tensor, before, rate)

    def commit(self) -> None:
        super().commit()
        self._average.commit()

    def rollback(self) -> None:
        super().rollback()
        self._average.rollback()
        self._last.clear()


def spec_of(options: Mapping[str, Any]) -> str | None:
    """Say which memory makes the steps of a torch.optim.Muon.

    Args:
        options: A group of its param_groups.

    Returns:
        The memory's spec, with all options but the decay; None if it has no option for something that is not the default.
    """
    if tuple(options["ns_coefficients"]) != COEFFICIENTS or options["eps"] != EPS or not 0 <= options["momentum"] < 1:
        return None
    if not 1 <= options["ns_steps"] <= 99:
        return None
    adjust = options["adjust_lr_fn"] or "original"
    return f"muon:{options['momentum']:g}:nesterov={options['nesterov']}:steps={options['ns_steps']}:adjust={adjust}".lower()


def orthogonalized(matrix: Any, steps: int, arrays: Arrays = NumpyArrays) -> Any:
    """Bring the singular values of a matrix to about 1, by Newton-Schulz iterations in float32.

    Args:
        matrix: An array of the kind, float32[n, m].
        steps: Number of iterations.
        arrays: The kind.

    Returns:
        float32[n, m]; singular values are from 0.7 to 1.2, except those that are less than about 0.003 of the norm.
    """
    a, b, c = COEFFICIENTS
    tall, found = matrix.shape[0] > matrix.shape[1], arrays.normalized(matrix, EPS)
    found = found.T if tall else found
    for _ in range(steps):
        gram = found @ found.T
        found = found * a + (gram * b + (gram @ gram) * c) @ found
    return found.T if tall else found

"""Memories `onebit_adam` and `zeroone_adam`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._util.numerics import non_finite_allowed, power_of_two
from .._util.rng import Stream
from ..communicators.base import Communicator
from ..communicators.factors import ShapedTensor
from ..errors import ConfigError, ExchangeError
from ..kernels.momentum import accumulate_momentum
from ..pipeline.compressor import Compressor
from ..registry import register
from ._by_tensor import ResidualByTensor
from .arrays import Arrays, NumpyArrays
from .moments import Moments, MomentStates


class CompressedAdam(ResidualByTensor):
    """Adam with one first moment that all ranks share, and a second moment that is updated in exact steps only.

    With m and v the moments, t the number of the step, and T that of the updates of v: in an exact step all ranks' gradients
    are averaged in float32, and m and v are Adam's of that mean. In all other steps, with e the residual of a rank i,

        m_i = beta1 * m + (1 - beta1) * g_i;   e + m_i is compressed and sent, and e keeps what was not;
        m = the mean over ranks of what they sent;   v stays as it is.

    Every exchange needs a step of the optimizer on all ranks, since what it gives is either a gradient or the new m.

    The step is p = p - lr * m / (1 - beta1**t) / (sqrt(v / (1 - beta2**T)) + eps), so in exact steps torch.optim.Adam's.

    Args:
        beta1: Factor of the first moment, from 0 to below 1, as in the optimizer.
        beta2: Factor of the second moment, above 0 and below 1, as in the optimizer.
        variance_floor: From the first compressed step on, an element's v counts as at least this share of the mean of its
            tensor's; finite and not negative.
    """

    supports_rows = False
    has_hooks = True
    corrects_gradient = True
    applies_momentum = True
    needs_step = True
    keeps_moments = True
    has_exact_steps = True
    needs_all_ranks = True
    receives_anywhere = True

    def __init__(self, beta1: float, beta2: float, variance_floor: float):
        if not 0 <= beta1 < 1:
            raise ConfigError(f"{self.name}: beta1={beta1}; allowed: from 0 to below 1")
        if not 0 < beta2 < 1:
            raise ConfigError(f"{self.name}: beta2={beta2}; allowed: above 0 and below 1")
        if not 0 <= variance_floor < math.inf:
            raise ConfigError(f"{self.name}: variance_floor={variance_floor}; allowed: finite and not negative")
        super().__init__()
        self.beta1 = self.first_moment = beta1
        self.beta2, self.variance_floor = beta2, variance_floor
        self._moments = MomentStates()
        self.shared = {"moments": self._moments}
        #: By tensor: whether what has arrived is a gradient and no first moment, and its scale.
        self._arrived: dict[str, tuple[bool, float]] = {}

    def updates_variance(self, steps: int, updates: int) -> bool:
        """Say whether a step is an exact one, in which the second moment is updated.

        Args:
            steps: Number of the tensor's steps before.
            updates: Number of those in which its second moment was updated.

        Returns:
            Whether it is.
        """
        raise NotImplementedError

    def check(self, compressor: Compressor, communicator: Communicator) -> None:
        super().check(compressor, communicator)
        if communicator.name == "tree":
            raise ConfigError(
                f"memory {self.name!r} has exact steps, which communicator 'tree' cannot alternate with: use allgather, "
                f"sharded or hierarchical"
            )

    def check_optimizer(
        self, optimizer: str, momentum: float, kind: str | None, options: Mapping[str, Any] | None = None
    ) -> None:
        if kind != "adam":
            raise ConfigError(
                f"memory {str(self)!r} needs an optimizer whose step it can change: Adam or AdamW, not inside of another "
                f"optimizer, and not {optimizer}"
            )
        beta2 = (options or {}).get("betas", (0.0, 0.0))[1]
        if (self.beta1, self.beta2) != (momentum, beta2):
            raise ConfigError(
                f"memory {str(self)!r} has beta1={self.beta1:g} and beta2={self.beta2:g}, the optimizer {momentum:g} and "
                f"{beta2:g}: give both the same; the memory has options of these names"
            )

    def works_at_positions(self, compressor: Compressor) -> bool:
        return True

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        raise ConfigError(f"memory {self.name!r} changes with each step: use it in an exchange, or memory 'residual'")

    def shared_size(self, tensor: ShapedTensor) -> int:
        return Moments.size_of(tensor.size)

    def _state(self, tensor: ShapedTensor) -> Moments | None:
        return self._moments.get(tensor.name, self.shared_size(tensor))

    def _updates(self, state: Moments | None) -> bool:
        return state is None or self.updates_variance(state.steps, state.updates)

    def sends_exactly(self, name: str) -> bool:
        # All tensors of a bucket, if one of them has begun later than the others.
        return any(self._updates(self._state(tensor)) for tensor in self._tensors[name])

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray, None]:
        self._check_stepped(name)
        exact, start = self.sends_exactly(name), 0
        for tensor, gradient in zip(self._tensors[name], parts, strict=True):
            own = out[start : start + tensor.size]
            start += tensor.size
            state = self._state(tensor)
            if exact or state is None:
                np.copyto(own, gradient)
            else:
                first = state.at(NumpyArrays).first
                accumulate_momentum(first, gradient, np.float32(self.beta1), np.float32(1 - self.beta1), own)
        return out, None

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        self._check_stepped(name)
        exact = self.sends_exactly(name)
        for tensor in self._tensors[name]:
            state, own = self._state(tensor), gradient[self._places[tensor.name][1]]
            if state is None:
                continue
            first = state.at(arrays).first  # also those of a checkpoint, in whichever step they come
            if not exact:
                own *= 1 - self.beta1
                own += first * self.beta1

    def _check_stepped(self, name: str) -> None:
        """Raise ExchangeError if the optimizer has made no step with what the last exchange of the bucket gave."""
        # One that was frozen, and so has lost its moments, waits for nothing.
        waiting = [one.name for one in self._tensors[name] if one.name in self._arrived and self._state(one) is not None]
        if waiting:
            raise ExchangeError(
                f"memory {self.name!r}: the optimizer made no step with what the last exchange gave for {waiting[0]!r}. It has to "
                f"make one after each exchange, on all ranks: with DDP accumulate gradients in no_sync(), and give all ranks "
                f"as many batches"
            )

    def on_received(self, name: str, out: np.ndarray, scale: float) -> None:
        self.on_received_anywhere(name, out, scale, NumpyArrays)

    def on_received_anywhere(self, name: str, out: Any, scale: float, arrays: Arrays) -> None:
        exact = self.sends_exactly(name)
        for tensor in self._tensors[name]:
            self._arrived[tensor.name] = exact, float(scale)
            if self._state(tensor) is None:
                self._moments.put(tensor.name, Moments(np.zeros(self.shared_size(tensor), np.float32)).at(arrays))

    def arrays_of_moments(self, tensor: ShapedTensor) -> Arrays:
        state = self._state(tensor)
        return super().arrays_of_moments(tensor) if state is None else state.arrays

    def moments(self, tensor: ShapedTensor, gradient: Any, penalty: Any | None = None) -> tuple[Any, Any]:
        state, arrived = self._state(tensor), self._arrived.pop(tensor.name, None)
        if state is None or arrived is None:  # nothing has arrived in this step
            root = self.arrays_of_moments(tensor).empty(tensor.size)
            root[:] = np.inf
            return gradient, root
        exact, scale = arrived
        updates, arrays, share1 = self._updates(state), state.arrays, 1 - self.beta1
        with non_finite_allowed():
            if penalty is not None:
                gradient = gradient + (penalty if exact else share1 * penalty)
            if scale != 1:
                gradient = gradient / scale
            if exact:
                arrays.accumulate(state.first, gradient, self.beta1, share1)
            else:
                state.first[:] = gradient
            if updates:
                arrays.accumulate(state.second, gradient * gradient, self.beta2, 1 - self.beta2)
        state.steps += 1
        state.updates += updates
        root = arrays.empty(tensor.size)
        root[:] = state.second
        arrays.to_root(root, state.floor)
        if updates and self.variance_floor and not self._updates(state):
            mean = arrays.total(state.second) / max(tensor.size, 1)
            state.floor = float(np.float32(power_of_two(self.variance_floor * mean)))
        root *= scale / math.sqrt(1 - self.beta2**state.updates)
        return state.first * (scale / (1 - self.beta1**state.steps)), root

    def forget_arrivals(self) -> None:
        self._arrived.clear()

    def commit(self) -> None:
        super().commit()
        self._moments.commit()

    def rollback(self) -> None:
        super().rollback()
        self._moments.rollback()
        self._arrived.clear()


@register
class OneBitAdam(CompressedAdam):
    """1-bit Adam: exact steps of Adam at first, then a frozen variance and compressed momenta of one bit an element.

    For the spec "dense/onebit", and Adam or AdamW, which leave both moments of the tensors that are compressed to the memory.
    CompressedAdam has the formulas. The first `warmup_steps` steps are exact, and all that follow are compressed. Every rank
    gets the mean of all ranks' compressed momenta, by containers; communicator "sharded" compresses that mean once more on its
    way back, as the paper's. Tensors that are sent exactly are left to the optimizer, and so stay Adam's for ever.

    After the warm-up the gradient that the optimizer gets is the new first moment. What is clipped then is the first moment,
    permanently. Adam's weight_decay in torch is part of the gradient and so of the moments; AdamW's shrinks the parameters. A
    tensor that comes in later has a warm-up of its own, in which its bucket is sent exactly.

    Args:
        warmup_steps: Number of exact steps, from 1 on; the paper takes 15 to 25 % of all. It has to be given.
        beta1: Factor of the first moment, from 0 to below 1, as in the optimizer.
        beta2: Factor of the second moment, above 0 and below 1, as in the optimizer.
        variance_floor: From the first compressed step on, an element's variance counts as at least this share of the mean of
            its tensor, 0 being the paper's algorithm. Without it training can diverge: an element whose gradient was nearly
            always zero in the warm-up gets the errors of its neighbors, divided by next to nothing.

    Source:
        Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang and He, 1-bit Adam: communication efficient large-scale training
        with Adam's convergence speed, ICML 2021, algorithm 1.
    """

    name = "onebit_adam"

    def __init__(
        self, warmup_steps: int | None = None, beta1: float = 0.9, beta2: float = 0.999, variance_floor: float = 0.1
    ):
        if not isinstance(warmup_steps, int) or warmup_steps < 1:
            raise ConfigError(
                f"onebit_adam: warmup_steps={warmup_steps}; allowed: integers from 1, as in 'onebit_adam:500', since the "
                f"variance must be known"
            )
        self.warmup_steps = warmup_steps
        super().__init__(beta1, beta2, variance_floor)

    def updates_variance(self, steps: int, updates: int) -> bool:
        return updates < self.warmup_steps


@register
class ZeroOneAdam(CompressedAdam):
    """0/1 Adam's variance: exact steps of Adam that become rare, and compressed momenta in all steps between them.

    As "onebit_adam", but without a warm-up whose length has to be known: the number of steps from the j-th exact step to the
    next, counted from j = 0, is 2**(j // period). The first `period` + 1 steps are exact, then every second one, and so on.

    What is left out of the paper's algorithm are its local steps, which exchange nothing at all: every step here exchanges
    what all ranks' gradients say. So v need not be frozen before local steps begin either. In an exact step the paper sends
    the compressed momentum as well; here the mean gradient is exact, so that momentum needs none, and the residual waits.

    Args:
        period: Number of exact steps after which the distance between them doubles, from 1 on; the paper's kappa.
        beta1: Factor of the first moment, from 0 to below 1, as in the optimizer.
        beta2: Factor of the second moment, above 0 and below 1, as in the optimizer.
        variance_floor: As of "onebit_adam"; the paper has none. It follows the variance.

    Source:
        Lu, Li, Zhang, De Sa and He, Maximizing communication efficiency for large-scale training via 0/1 Adam, ICLR 2023,
        arXiv 2202.06009, algorithm 1 with a synchronization in each step, and the policy of its variance updates.
    """

    name = "zeroone_adam"

    def __init__(self, period: int = 16, beta1: float = 0.9, beta2: float = 0.999, variance_floor: float = 0.1):
        if period < 1:
            raise ConfigError(f"zeroone_adam: period={period}; allowed: integers from 1")
        self.period = period
        super().__init__(beta1, beta2, variance_floor)

    def updates_variance(self, steps: int, updates: int) -> bool:
        doublings, rest = divmod(updates, self.period)
        return steps >= self.period * (2**doublings - 1) + rest * 2**doublings

"""Memory `residual`."""

from typing import Any

import numpy as np

from ..communicators.base import Pending
from ..errors import ConfigError
from ..pipeline.compressor import Compressor, as_dense
from ..registry import register
from .arrays import Arrays, NumpyArrays
from .base import Memory
from .packed_states import PackedStates, make_states
from .packed_vector import PackedVector


@register
class Residual(Memory):
    """Error feedback: what was not sent is added to the next gradient.

    A state with a NaN or an Inf is never kept.

    Args:
        decay: Factor of a residual after each step, above 0 and at most 1. Rows of a table decay when they are touched.
        bits: Bits in which an element is kept between steps: 32, 16 (bfloat16) or 8 (with a scale for 128 elements), both
            rounded at random. Tables whose gradients come as rows keep 32. Checkpoints hold float32.

    Source:
        Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes SignSGD
        and other gradient compression schemes, ICML 2019.
    """

    name = "residual"
    stateful = True
    takes_lent_buffers = True
    supports_rows = True
    suits_sender_means = True

    def __init__(self, decay: float = 1.0, bits: int = 32):
        if not 0 < decay <= 1:
            raise ConfigError(f"residual: decay={decay}; allowed: above 0 and at most 1")
        self.decay, self.bits = decay, bits
        self._residual = make_states("residual", bits)
        if bits != 32:  # they are packed once something has been sent
            self.has_hooks = self.hooks_work_dense = True
        self.keeps_rounded = bits == 16
        self._of_rows: Residual | None = None
        self.states = {"residual": self._residual}
        #: name -> (the table, float32[n, width]; the rows, int64[r]; their next state, float32[r, width])
        self._begun_rows: dict[str, tuple[Any, Any, Any]] = {}

    def for_rows(self) -> Memory:
        if self.bits == 32:
            return self
        self._of_rows = self._of_rows or Residual(self.decay)
        return self._of_rows

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        if self.corrects_gradient:  # in `correct_gradient`, which only an exchange calls
            return super().compensate(name, gradient)
        gradient = _vector("gradient", name, gradient)
        state = self._residual.find(name, gradient.size)
        # A zero is added where there is no state, because the fused path turns -0.0 into 0.0 as well.
        return gradient + (np.float32(0) if state is None else state)

    def update(self, name: str, compensated: np.ndarray, transmitted: np.ndarray) -> None:
        compensated, transmitted = _vector("compensated", name, compensated), _vector("transmitted", name, transmitted)
        if compensated.size != transmitted.size:
            raise ConfigError(f"compensated of {name!r} has {compensated.size} elements, transmitted {transmitted.size}")
        error = compensated - transmitted
        if np.isfinite(error).all():
            self._residual.put(name, self._decayed(error))

    def on_sent(self, name: str, pending: Pending) -> None:
        if isinstance(self._residual, PackedStates) and not pending.keeps_state:
            self._residual.seal(name)

    def works_at_positions(self, compressor: Compressor) -> bool:
        return True

    def begin(self, name: str, size: int, arrays: Arrays = NumpyArrays, lent: np.ndarray | None = None) -> tuple[Any, Any]:
        return self._residual.begin(name, size, arrays, lent)

    def begin_rounded(self, name: str, size: int, arrays: Arrays) -> tuple[PackedVector, PackedVector]:
        assert isinstance(self._residual, PackedStates)
        return self._residual.begin_packed(name, size, arrays)

    def settle(self, name: str, keep: bool) -> np.ndarray:
        free = self._residual.settle(name, keep)
        if keep and self.decay != 1:
            self._residual.scale(name, slice(None), np.float32(self.decay))
        return free

    def begin_rows(
        self, name: str, size: int, rows: np.ndarray, width: int, arrays: Arrays = NumpyArrays
    ) -> tuple[Any, Any]:
        table, places = self._residual.get(name, size, arrays).reshape(-1, width), arrays.from_host(rows)
        following = arrays.empty(rows.size * width)
        self._begun_rows[name] = table, places, following.reshape(-1, width)
        return table[places].reshape(-1), following

    def _decayed(self, state: Any) -> Any:
        if self.decay != 1:
            state *= self.decay
        return state

    def commit(self) -> None:
        for name in self._residual.commit():
            if self.decay != 1:
                self._residual.scale(name, slice(None), np.float32(self.decay))
        for table, rows, following in self._begun_rows.values():
            table[rows] = self._decayed(following)
        self._begun_rows.clear()

    def rollback(self) -> None:
        super().rollback()
        self._begun_rows.clear()

    def load_state_dict(self, state: dict[str, dict[str, np.ndarray]], copy: bool = True) -> None:
        super().load_state_dict(state, copy)
        self._begun_rows.clear()


def _vector(what: str, name: str, array: np.ndarray) -> np.ndarray:
    """A vector that is given on the plain road, as float32."""
    if np.ndim(array) != 1:
        raise ConfigError(
            f"{what} of {name!r} has the shape {np.shape(array)}; allowed: one dimension, as of {what}.reshape(-1), since "
            f"decompress gives one"
        )
    return as_dense(array)[0]

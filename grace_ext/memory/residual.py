"""Memory `residual`."""

from typing import Any

import numpy as np

from ..errors import ConfigError
from ..registry import register
from .base import Memory
from .states import Arrays, NumpyArrays, States


@register
class Residual(Memory):
    """Error feedback: what was not sent is added to the next gradient.

    A state with a NaN or an Inf is never kept.

    Args:
        decay: Factor of a residual after each step, above 0 and at most 1. Rows of a table decay when they are touched.

    Source:
        Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes SignSGD
        and other gradient compression schemes, ICML 2019.
    """

    name = "residual"
    stateful = True
    supports_rows = True

    def __init__(self, decay: float = 1.0):
        if not 0 < decay <= 1:
            raise ConfigError(f"residual: decay={decay}; allowed: above 0 and at most 1")
        self.decay = decay
        self._residual = States("residual")
        self.states = {"residual": self._residual}
        #: name -> (the table, float32[n, width]; the rows, int64[r]; their next state, float32[r, width])
        self._begun_rows: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        state = self._residual.find(name, gradient.size)
        # A zero is added where there is no state, because the fused path turns -0.0 into 0.0 as well.
        return gradient + (np.float32(0) if state is None else state)

    def update(self, name: str, compensated: np.ndarray, transmitted: np.ndarray) -> None:
        error = compensated - transmitted
        if np.isfinite(error).all():
            self._residual.put(name, self._decayed(error))

    def begin(self, name: str, size: int, arrays: Arrays = NumpyArrays) -> tuple[Any, Any]:
        return self._residual.begin(name, size, arrays)

    def begin_rows(self, name: str, size: int, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        table = self._residual.get(name, size).reshape(-1, width)
        state = table[rows]
        following = np.empty_like(state)
        self._begun_rows[name] = table, rows, following
        return state.reshape(-1), following.reshape(-1)

    def _decayed(self, state: Any) -> Any:
        if self.decay != 1:
            state *= self.decay
        return state

    def commit(self) -> None:
        for state in self._residual.commit():
            self._decayed(state)
        for table, rows, following in self._begun_rows.values():
            table[rows] = self._decayed(following)
        self._begun_rows.clear()

    def rollback(self) -> None:
        super().rollback()
        self._begun_rows.clear()

    def load_state_dict(self, state: dict[str, dict[str, np.ndarray]]) -> None:
        super().load_state_dict(state)
        self._begun_rows.clear()

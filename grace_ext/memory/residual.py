"""Error feedback: what was not sent is added to the next gradient.

Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes SignSGD and
other gradient compression schemes, ICML 2019.
"""

import numpy as np

from ..errors import ConfigError
from ..registry import register
from .base import Memory, NumpyArrays


@register
class Residual(Memory):
    """Keeps float32[d] a name, twice: the state in force and, while a step is under way, the next one.

    A state with a NaN or an Inf is never kept.
    """

    name = "residual"
    stateful = True

    def __init__(self):
        self._state: dict = {}
        self._next: dict = {}
        self._arrays: dict = {}  # of the names in use: which kind of arrays their state is; others are numpy
        self._begun: set[str] = set()
        self._begun_rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # rows and their next state, float32[r, width]

    def compensate(self, name, gradient):
        state = self._state.get(name)
        if state is None:
            return gradient + np.float32(0)  # not the gradient itself: -0.0 becomes 0.0, as on the fused road
        self._check_size(name, gradient.size)
        return gradient + state

    def update(self, name, compensated, transmitted):
        error = compensated - transmitted
        if np.isfinite(error).all():
            self._state[name] = error

    def begin(self, name, size, arrays=NumpyArrays):
        self._check_size(name, size)
        if name not in self._next:
            state = self._state.get(name)
            self._state[name] = arrays.zeros(size) if state is None else arrays.from_host(state)
            self._next[name] = arrays.zeros(size)
            self._arrays[name] = arrays
        self._begun.add(name)
        return self._state[name], self._next[name]

    def begin_rows(self, name, size, rows, width):
        self._check_size(name, size)
        if name not in self._state:
            self._state[name] = np.zeros(size, np.float32)
        state = self._state[name].reshape(-1, width)[rows]
        following = np.empty_like(state)
        self._begun_rows[name] = rows, following
        return state.reshape(-1), following.reshape(-1)

    def _check_size(self, name, size):
        state = self._state.get(name)
        if state is not None and len(state) != size:
            raise ConfigError(f"residual of {name!r} has {len(state)} elements, the gradient {size}")

    def commit(self):
        for name in self._begun:
            self._state[name], self._next[name] = self._next[name], self._state[name]
        for name, (rows, following) in self._begun_rows.items():
            self._state[name].reshape(-1, following.shape[1])[rows] = following
        self.rollback()

    def rollback(self):
        self._begun.clear()
        self._begun_rows.clear()

    def state_dict(self):
        return {name: self._arrays.get(name, NumpyArrays).to_host(state) for name, state in self._state.items()}

    def load_state_dict(self, state):
        self._state = {name: np.array(array, np.float32).reshape(-1) for name, array in state.items()}
        self._next.clear()
        self._arrays.clear()
        self.rollback()

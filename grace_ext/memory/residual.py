"""Error feedback: what was not sent is added to the next gradient.

Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes SignSGD and
other gradient compression schemes, ICML 2019.
"""

import numpy as np

from ..errors import ConfigError
from ..registry import register
from .base import Memory


@register
class Residual(Memory):
    """Keeps float32[d] a name, twice: the state in force and, while a step is under way, the next one.

    A state with a NaN or an Inf is never kept.
    """

    name = "residual"
    stateful = True

    def __init__(self):
        self._state: dict[str, np.ndarray] = {}
        self._next: dict[str, np.ndarray] = {}
        self._begun: set[str] = set()

    def compensate(self, name, gradient):
        state = self._state.get(name)
        return gradient if state is None else gradient + state

    def update(self, name, compensated, transmitted):
        error = compensated - transmitted
        if np.isfinite(error).all():
            self._state[name] = error

    def begin(self, name, size):
        state = self._state.get(name)
        if state is None:
            state = self._state[name] = np.zeros(size, np.float32)
        if state.size != size:
            raise ConfigError(f"residual of {name!r} has {state.size} elements, the gradient {size}")
        following = self._next.get(name)
        if following is None or following.size != size:
            following = self._next[name] = np.empty(size, np.float32)
        self._begun.add(name)
        return state, following

    def commit(self):
        for name in self._begun:
            self._state[name], self._next[name] = self._next[name], self._state[name]
        self._begun.clear()

    def rollback(self):
        self._begun.clear()

    def state_dict(self):
        return {name: state.copy() for name, state in self._state.items()}

    def load_state_dict(self, state):
        self._state = {name: np.array(array, np.float32).reshape(-1) for name, array in state.items()}
        self._next.clear()
        self._begun.clear()

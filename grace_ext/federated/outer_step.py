"""The step that the server makes with the mean of a round's updates."""

import copy
from collections.abc import Callable, Mapping

import numpy as np

from .._util.numerics import non_finite_allowed
from ..errors import ConfigError
from ..outer import OuterOptimizer, make_outer


class OuterStep:
    """An outer optimizer with its state for one vector, which never changes: a step gives another object.

    Args:
        optimizer: See Server.
        size: Number of elements of the model.

    Raises:
        ConfigError: The spec is unknown, or it is neither a spec nor an outer optimizer nor a function.
    """

    def __init__(self, optimizer: "str | OuterOptimizer | Callable | None", size: int):
        self._function: Callable | None = None
        if optimizer is None or isinstance(optimizer, str | OuterOptimizer):
            self._outer = make_outer(optimizer or "sgd")
        elif callable(optimizer):
            self._outer, self._function = make_outer("sgd"), optimizer
        else:
            raise ConfigError(
                f"optimizer={optimizer!r}; allowed: a spec as 'adam:lr=0.01', an OuterOptimizer, or a function"
            )
        self._size, self._number = size, 0
        self._state = self._outer.begin(size)

    def made(self, model: np.ndarray, mean: np.ndarray) -> "OuterStep":
        """Make a step.

        Args:
            model: float32[d]; changed in place.
            mean: The mean of the updates, float32[d]; it may be overwritten.

        Returns:
            The state for the next step.
        """
        following = copy.copy(self)
        following._number = self._number + 1
        if self._function is not None:
            self._function(model, mean)
            return following
        following._state = {field: array.copy() for field, array in self._state.items()}
        with non_finite_allowed():  # the next round refuses a model that is not finite
            self._outer.step(model, mean, following._state, following._number)
        return following

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return what the next round needs.

        Returns:
            Arrays by name, for numpy.savez.
        """
        fields = {f"outer.{field}": array for field, array in self._state.items()}
        return {**fields, "outer_steps": np.array(self._number)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: Arrays by name, at least those of `state_dict`.

        Raises:
            ConfigError: The state is that of another optimizer, or of a model of another size.
        """
        saved = {key.removeprefix("outer."): state[key] for key in state if key.startswith("outer.")}
        if {field: array.size for field, array in saved.items()} != {
            field: array.size for field, array in self._state.items()
        }:
            raise ConfigError(
                f"the state's optimizer keeps {', '.join(sorted(saved)) or 'nothing'}, and this server's, "
                f"{str(self._outer)!r}, {', '.join(sorted(self._state)) or 'nothing'}, for {self._size} elements"
            )
        self._state = {field: np.array(array, np.float32) for field, array in saved.items()}
        self._number = int(state["outer_steps"])

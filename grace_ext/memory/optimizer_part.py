"""What a memory has to do with the step of the optimizer."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..communicators.factors import ShapedTensor
from ..errors import ConfigError
from .arrays import Arrays, NumpyArrays


class OptimizerPart:
    """The half of a memory's interface that the adapters' optimizers use; the memory's own half is Memory.

    Memories that leave the optimizer's step alone keep what is here.
    """

    name: str

    #: Whether the memory applies the momentum, so that the optimizer must have none.
    applies_momentum = False
    #: Where it keeps Adam's first moment, the factor beta1 of this.
    first_moment: float | None = None
    #: Whether the optimizer's step is another one with this memory, made with what that keeps.
    needs_step = False
    #: Whether this is `moments`, both of them element by element. If not, it is `denominator`. Only if `needs_step`.
    keeps_moments = False

    def check_optimizer(
        self, optimizer: str, momentum: float, kind: str | None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Check that this memory and an optimizer fit together.

        Args:
            optimizer: Name of the optimizer's class.
            momentum: Its momentum, Adam's beta1; 0 for none.
            kind: "adam" or "muon" for those that can leave a part of their step to a memory; None for all others.
            options: Its other options, by the names of torch's param_groups; None where they are not known.

        Raises:
            ConfigError: Both would apply a momentum, or the memory needs an optimizer of another kind or with other options.
        """
        if not self.applies_momentum or not momentum:
            return
        if self.first_moment is None or kind != "adam":
            others = "" if self.first_moment is None else ", or Adam or AdamW, not inside of another optimizer"
            raise ConfigError(
                f"memory {str(self)!r} applies the momentum before gradients are compressed, and that of {optimizer}, "
                f"{momentum:g}, would be applied once more: use for example SGD with momentum=0{others}"
            )
        if self.first_moment != momentum:
            raise ConfigError(
                f"memory '{self.name}:{self.first_moment:g}' and the optimizer's beta1={momentum:g} differ: use "
                f"'{self.name}:{momentum:g}'"
            )

    def element_needed(self, tensor: ShapedTensor) -> int:
        """Say which element `denominator` will ask for, so that several can be copied from an accelerator at once.

        Args:
            tensor: The tensor.

        Returns:
            Its position, in the order of the bucket's vector; 0 if none will be asked for.
        """
        raise NotImplementedError

    def denominator(
        self, tensor: ShapedTensor, element_at: Callable[[int], float], rate: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what a step is divided by, the same bits on all ranks. Only if `needs_step`, and not with `keeps_moments`.

        Args:
            tensor: The tensor.
            element_at: element_at(position) returns an element of the gradient that the optimizer steps with, in the order of
                the bucket's vector. It tells by how much gradients have been clipped since the exchange.
            rate: The learning rate of the tensor in this step.

        Returns:
            float32[rows] and float32[columns], the first dimension and all others: the step is divided by their outer product.

        Raises:
            ConfigError: The memory has to have its updates as they were received, and one was changed.
        """
        raise NotImplementedError

    def arrays_of_moments(self, tensor: ShapedTensor) -> Arrays:
        """Return the kind of arrays that `moments` takes and gives. Only if `keeps_moments`.

        Args:
            tensor: The tensor.

        Returns:
            The kind.
        """
        return NumpyArrays

    def moments(self, tensor: ShapedTensor, gradient: Any, penalty: Any | None = None) -> tuple[Any, Any]:
        """Return both of a tensor's moments in a step, the same bits on all ranks. Only if `keeps_moments`.

        Args:
            tensor: The tensor.
            gradient: The gradient that the optimizer steps with, float32[d], in the order of the bucket's vector; see
                `arrays_of_moments`.
            penalty: What a weight decay that is part of the gradient adds to it, float32[d]; None for nothing.

        Returns:
            The first moment and the root of the second one, both corrected for their bias, float32[d]. The root is Inf where
            there is nothing to step with.
        """
        raise NotImplementedError

    def forget_arrivals(self) -> None:
        """Note that no step will be made with what has arrived, since the optimizer's step is over or states were loaded."""

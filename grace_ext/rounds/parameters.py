"""What the engine of rounds needs of a model, and a model that is numpy arrays."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ..errors import ConfigError
from ..exchange.buckets import Bucket, Tensor
from ..kernels import NON_FINITE, max_magnitude


class Parameters(Protocol):
    """The parameters of one worker's model, by name, and its buffers: what training changes without a gradient."""

    def tensors(self) -> Sequence[Tensor]:
        """Describe the parameters.

        Returns:
            The parameters, in the same order on all ranks.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Check, when a round begins, that what is trained is still what `tensors` describes.

        Raises:
            ConfigError: The model has changed.
        """

    def read(self, name: str, out: np.ndarray) -> None:
        """Copy a parameter.

        Args:
            name: Its name.
            out: Output, float32[size].
        """

    def moved(self, name: str, shared: np.ndarray, out: np.ndarray) -> None:
        """Compute by how much a parameter has moved away from what the ranks share.

        Args:
            name: Its name.
            shared: What the ranks share, float32[size]. Where the parameter has a lower precision, it counts as rounded to that.
            out: Output, float32[size]: shared minus the parameter.
        """

    def assign(self, name: str, shared: np.ndarray, keep: float) -> None:
        """Change a parameter to keep · parameter + (1 - keep) · shared.

        Args:
            name: Its name.
            shared: What the ranks share, float32[size].
            keep: The share that the parameter keeps of itself, 0 to below 1. With 0, what it was before does not matter.
        """

    def read_buffers(self) -> np.ndarray:
        """Copy the buffers that are averaged.

        Returns:
            float32[n], joined; empty if there are none.
        """
        raise NotImplementedError

    def assign_buffers(self, averaged: np.ndarray, keep: float) -> None:
        """Change the buffers as `assign` changes a parameter.

        Args:
            averaged: float32[n].
            keep: See `assign`.
        """

    def save_own(self, parameters: bool) -> dict[str, np.ndarray]:
        """Copy what is this rank's own, for a checkpoint: all buffers that a checkpoint of the model has, whatever their dtype.

        Args:
            parameters: Whether the parameters are this rank's own, too, because it is amid a round.

        Returns:
            The bytes of each, uint8[n], by name.
        """
        raise NotImplementedError

    def load_own(self, saved: Mapping[str, np.ndarray]) -> None:
        """Load what `save_own` gave.

        Args:
            saved: Bytes by name.

        Raises:
            ConfigError: They are those of another model. Then nothing has changed.
        """

    def recovered(self) -> None:
        """Note that all parameters were replaced because one was not finite, so that nothing else of that is left."""


class ArrayParameters(Parameters):
    """Parameters that are numpy arrays.

    Args:
        arrays: float32 arrays by name, contiguous, which are changed in place.
        buffers: The same for buffers.

    Raises:
        ConfigError: An array is of another dtype, or not contiguous.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], buffers: Mapping[str, np.ndarray] | None = None):
        for name, array in {**arrays, **(buffers or {})}.items():
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ConfigError(f"{name!r} is {array.dtype} with strides {array.strides}; allowed: contiguous float32")
        self._shapes = {name: array.shape for name, array in arrays.items()}
        self._flat = {name: array.reshape(-1) for name, array in arrays.items()}
        self._buffers = [array.reshape(-1) for array in (buffers or {}).values()]

    def tensors(self) -> list[Tensor]:
        return [Tensor(name, self._flat[name].size, len(shape), shape=shape) for name, shape in self._shapes.items()]

    def read(self, name: str, out: np.ndarray) -> None:
        np.copyto(out, self._flat[name])

    def moved(self, name: str, shared: np.ndarray, out: np.ndarray) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # the engine looks for what is not finite
            np.subtract(shared, self._flat[name], out=out)

    def assign(self, name: str, shared: np.ndarray, keep: float) -> None:
        _mix(self._flat[name], shared, keep)

    def read_buffers(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.float32), *self._buffers])

    def save_own(self, parameters: bool) -> dict[str, np.ndarray]:
        return {name: array.view(np.uint8).copy() for name, array in self._own(parameters).items()}

    def load_own(self, saved: Mapping[str, np.ndarray]) -> None:
        known = self._own(True)
        check_own(saved, {name: array.nbytes for name, array in known.items()})
        for name, content in saved.items():
            known[name].view(np.uint8)[:] = content

    def _own(self, parameters: bool) -> dict[str, np.ndarray]:
        buffers = {f"buffer {number}": buffer for number, buffer in enumerate(self._buffers)}
        return buffers | (self._flat if parameters else {})

    def assign_buffers(self, averaged: np.ndarray, keep: float) -> None:
        start = 0
        for buffer in self._buffers:
            _mix(buffer, averaged[start : start + buffer.size], keep)
            start += buffer.size


def _mix(array: np.ndarray, shared: np.ndarray, keep: float) -> None:
    if keep:
        array *= np.float32(keep)
        array += np.float32(1 - keep) * shared
    else:
        np.copyto(array, shared)


def check_own(saved: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> None:
    """Check what `Parameters.load_own` is given.

    Args:
        saved: Bytes by name.
        sizes: How many bytes there are of each name.

    Raises:
        ConfigError: There are others.
    """
    if wrong := sorted(name for name, content in saved.items() if sizes.get(name) != np.size(content)):
        raise ConfigError(
            f"the checkpoint's parameters and buffers are of another model; they differ in {', '.join(wrong[:5])}"
        )


def fitting_arrays(what: str, given: dict, wanted: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copy arrays of a checkpoint, if they are those of these names and sizes.

    Args:
        what: What they are, for the message.
        given: The arrays by name.
        wanted: Arrays of the sizes that are wanted, by name.

    Returns:
        Copies, float32[size] by name.

    Raises:
        ConfigError: They have other names or sizes.
    """
    sizes = {name: np.size(array) for name, array in given.items()}
    if sizes != {name: array.size for name, array in wanted.items()}:
        differing = sorted(
            name
            for name in sizes.keys() | wanted.keys()
            if sizes.get(name) != (wanted[name].size if name in wanted else None)
        )
        raise ConfigError(
            f"the checkpoint's {what} are of other tensors or of another outer optimizer; they differ in {', '.join(differing[:5])}"
        )
    return {name: np.array(given[name], np.float32).reshape(-1) for name in wanted}


def parts_of(bucket: Bucket, vector: np.ndarray) -> Sequence[tuple[str, np.ndarray]]:
    """Split what a bucket holds by tensor.

    Args:
        bucket: The bucket.
        vector: float32[size].

    Returns:
        The name of each tensor, and a view of its part.
    """
    parts = np.split(vector, np.cumsum(bucket.sizes)[:-1])
    return [(tensor.name, part) for tensor, part in zip(bucket.tensors, parts, strict=True)]


def is_finite(vector: np.ndarray) -> bool:
    """Say whether no element of a vector is NaN or Inf, without an array in between.

    Args:
        vector: float32[size].

    Returns:
        Whether all elements are finite.
    """
    return bool(max_magnitude(vector) < NON_FINITE)

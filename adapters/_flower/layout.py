"""Where the arrays of a model are in the one vector that is compressed."""

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np
import xxhash
from flwr.app import Array, ArrayRecord

from grace_ext import ConfigError, ContainerError
from grace_ext._util.names import fits
from grace_ext.pipeline.container import check_elements

_FLOATS = ("float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of the model.

    Attributes:
        name: Its key in the ArrayRecord.
        shape: Its shape.
        dtype: The name of its dtype.
        sent: Whether it is a part of the vector. Otherwise it stays as it was in the initial arrays.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sent: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Layout:
    """The arrays of a model, in their order.

    Args:
        entries: The arrays.
    """

    def __init__(self, entries: Sequence[Entry]):
        self._entries = tuple(entries)
        #: Number of elements of the vector.
        self.size = sum(entry.size for entry in self._entries if entry.sent)

    @classmethod
    def of(cls, arrays: ArrayRecord, unchanged: Sequence[str] = ()) -> "Layout":
        """Lay out a model.

        Args:
            arrays: The model.
            unchanged: Patterns, as of fnmatch, of the names of arrays that are not a part of the vector, or these names.

        Returns:
            The layout.

        Raises:
            ConfigError: An array is not of floating point and is not matched by a pattern, or nothing is left to send.
        """
        entries = []
        for name, array in arrays.items():
            sent = not fits(name, unchanged)
            if sent and array.dtype not in _FLOATS:
                raise ConfigError(
                    f"the array {name!r} is {array.dtype}; allowed: {', '.join(_FLOATS)}, or a pattern in unchanged=(...) "
                    "that matches its name, if clients need not tell each other of its changes"
                )
            entries.append(Entry(name, tuple(array.shape), array.dtype, sent))
        layout = cls(entries)
        if not layout.size:
            raise ConfigError("the model has no elements that could be sent")
        return layout

    @classmethod
    def read(cls, text: str) -> "Layout":
        """Read what `text` has written.

        Args:
            text: The layout as JSON.

        Returns:
            The layout.

        Raises:
            ContainerError: The text is no layout.
        """
        try:
            entries = [
                Entry(str(name), tuple(map(int, shape)), str(dtype), bool(sent))
                for name, shape, dtype, sent in json.loads(text)
            ]
            if any(length < 0 for entry in entries for length in entry.shape):
                raise ValueError("a length is negative")
            layout = cls(entries)
            check_elements(layout.size)
        except (ValueError, TypeError, ConfigError) as error:
            raise ContainerError(f"this is no layout of a model: {error}") from error
        return layout

    @property
    def text(self) -> str:
        """The layout as JSON."""
        return json.dumps([[one.name, one.shape, one.dtype, one.sent] for one in self._entries], separators=(",", ":"))

    def vector(self, arrays: ArrayRecord) -> np.ndarray:
        """Join the arrays of a model that are sent.

        Args:
            arrays: The model.

        Returns:
            float32[d].

        Raises:
            ConfigError: The model has other arrays, shapes or kinds of numbers.
        """
        if set(arrays) != (names := {entry.name for entry in self._entries}):
            raise ConfigError(
                f"the model lacks the arrays {sorted(names - set(arrays))} and has {sorted(set(arrays) - names)} too many"
            )
        parts = []
        for entry in self._entries:
            if not entry.sent:
                continue
            values = arrays[entry.name].numpy()
            if values.shape != entry.shape or values.dtype.name not in _FLOATS:
                raise ConfigError(
                    f"the array {entry.name!r} is {values.dtype}{list(values.shape)}; it was {entry.dtype}{list(entry.shape)}"
                )
            with np.errstate(over="ignore"):  # an Inf is refused later, with the vector
                parts.append(values.astype(np.float32).reshape(-1))
        return np.concatenate(parts)

    def unchanged(self, arrays: ArrayRecord) -> ArrayRecord:
        """Choose the arrays that are not sent.

        Args:
            arrays: The model.

        Returns:
            Those of its arrays.
        """
        return ArrayRecord({entry.name: arrays[entry.name] for entry in self._entries if not entry.sent})

    def arrays(self, vector: np.ndarray, unchanged: ArrayRecord) -> ArrayRecord:
        """Split a vector into the arrays of a model.

        Args:
            vector: float32[d].
            unchanged: The arrays that are not a part of it.

        Returns:
            The model, in the dtypes of its arrays.
        """
        found, at = {}, 0
        for entry in self._entries:
            if entry.sent:
                part = vector[at : at + entry.size].reshape(entry.shape)
                found[entry.name] = Array(part.astype(entry.dtype))
                at += entry.size
            else:
                found[entry.name] = unchanged[entry.name]
        return ArrayRecord(found)

    def digest(self, arrays: ArrayRecord) -> bytes:
        """Compute what identifies a model with this layout.

        Args:
            arrays: The model.

        Returns:
            16 bytes.
        """
        hashed = xxhash.xxh3_128(self.text.encode())
        for entry in self._entries:
            hashed.update(np.ascontiguousarray(arrays[entry.name].numpy()).tobytes())
        return hashed.digest()

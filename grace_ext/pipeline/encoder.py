"""Encoding: dense gradient -> transform, sparsifier -> index codec and value codec -> container."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .. import registry
from .._util.rng import Stream, checked_seed
from ..errors import ConfigError
from ..index.base import IndexCodec
from ..index.keys import Keys
from ..index.raw import RawIndex
from ..index.shared import Shared
from ..kernels import NON_FINITE, max_magnitude
from ..sparsifiers.base import Scope, Sparsifier
from ..sparsifiers.randomk import scaled
from ..transforms.base import Transform
from ..value.base import ValueCodec
from ..value.raw import RawValue
from . import container
from .coefficients import select_coefficients
from .encoded import Encoded, StageClock, as_received

_EMPTY = np.empty(0, np.uint8)
#: The bits of 2**126. From there on, the difference of two values may overflow, and with it the residual.
HUGE = NON_FINITE - (2 << 23)


class Encoder:
    """The encoding half of a compressor: it selects values, encodes positions and values, and writes the container.

    Args:
        stages: The stages by kind: "sparsifier", "index", "value" and, optionally, "transform".
        seed: Seed of all random choices, an integer of 64 bits.

    Raises:
        ConfigError: The stages do not fit together, or the seed is out of range.
    """

    def __init__(self, stages: Mapping[str, Any], seed: int = 0):
        self.transform: Transform | None = stages.get("transform")
        self.sparsifier: Sparsifier = stages["sparsifier"]
        self.index: IndexCodec = stages["index"]
        self.value: ValueCodec = stages["value"]
        self.seed = checked_seed(seed)
        if self.sparsifier.needs_chunks and self.transform is None:
            raise ConfigError(f"{self.sparsifier} needs a transform before it: there are no chunks")
        if self.value.needs_chunks and not self.sparsifier.needs_chunks:
            raise ConfigError(
                f"{self.value} needs a sparsifier that sends as many values of each of a transform's chunks, "
                f"like topk:per=chunk, and not {self.sparsifier}"
            )
        self.fitted_value = self.value  #: The value codec as it works: fitted to the values of a transform's chunks.
        if self.value.needs_chunks:
            self.fitted_value = self.value.for_chunks(self.sparsifier.count(self.transform.chunk))
        if not (self.index.universal or self.sparsifier.shared):
            raise ConfigError(
                f"index codec {self.index.name!r} is for positions that all ranks draw alike, as randomk "
                f"does, not for those of {self.sparsifier.name!r}"
            )

    def encode(
        self,
        dense: Any,
        stream: Stream,
        *,
        state: tuple[Any, np.ndarray] | None = None,
        sizes: Iterable[int] | None = None,
        dtype: str = "float32",
        shape: tuple[int, ...] | None = None,
    ) -> Encoded:
        """Encode a gradient. Like `Compressor.compress`, but it returns all that the sender knows about the container.

        Args:
            dense: The gradient, float32[d]. With a state, if the compressor `takes_parts`, vectors that together are it, too.
            stream: The random numbers of this gradient on this rank.
            state: (residual, pending) for error feedback, as in `encode_compensated`, or (None, gradient): see `encode_in_place`.
            sizes: Numbers of elements of the tensors that the gradient consists of, in order; None for a single tensor.
            dtype: The gradient's dtype as the container names it.
            shape: A shape for the container to store, or None.

        Returns:
            The container and what belongs to it.

        Raises:
            ConfigError: No container can hold the gradient, or `sizes` do not sum to d.
        """
        if state is not None:
            if state[0] is None:
                return self.encode_in_place(dense, stream, sizes=sizes)
            return self.encode_compensated(dense, *state, stream, sizes=sizes, dtype=dtype, shape=shape)
        started = time.perf_counter()
        if self.transform is not None:
            return self._encode_transformed(dense, None, stream, dtype, shape, started)
        indices, values = self.sparsifier.select(dense, Scope.of_gradient(stream, sizes, dense.size))
        return self.pack(
            dense.size, indices, values, lambda support: dense[support], stream, dtype=dtype, shape=shape, started=started
        )

    def encode_compensated(
        self,
        gradient: Any,
        residual: np.ndarray,
        pending: np.ndarray,
        stream: Stream,
        *,
        sizes: Iterable[int] | None = None,
        dtype: str = "float32",
        shape: tuple[int, ...] | None = None,
    ) -> Encoded:
        """Encode gradient + residual, and write what the container does not carry to `pending`.

        Bytes and remainder are those of adding, encoding and subtracting the decoded container, with one pass less.

        Args:
            gradient: float32[d], or parts of it; see `encode`.
            residual: What earlier containers have not carried, float32[d].
            pending: Output, float32[d]; undefined if gradient + residual is not finite.
            stream: The random numbers of this gradient on this rank.
            sizes: Numbers of elements of the tensors that the gradient consists of, in order; None for a single tensor.
            dtype: The gradient's dtype as the container names it.
            shape: A shape for the container to store, or None.

        Returns:
            The container and what belongs to it.

        Raises:
            ConfigError: No container can hold the gradient, or `sizes` do not sum to d.
        """
        started = time.perf_counter()
        if self.transform is not None:
            return self._encode_transformed(gradient, pending, stream, dtype, shape, started, residual)
        indices, values = self.sparsifier.select_compensated(
            gradient, residual, pending, Scope.of_gradient(stream, sizes, pending.size)
        )
        values = pending if indices is None else values
        encoded = self.pack(
            pending.size,
            indices,
            values,
            lambda support: pending[support],
            stream,
            dtype=dtype,
            shape=shape,
            started=started,
        )
        encoded.write_remainder(pending)
        return encoded

    def encode_in_place(self, dense: np.ndarray, stream: Stream, *, sizes: Iterable[int] | None = None) -> Encoded:
        """Encode a gradient and leave in its array what the container does not carry.

        Args:
            dense: The gradient, float32[d], overwritten; undefined afterwards if it is not finite.
            stream: The random numbers of this gradient on this rank.
            sizes: Numbers of elements of the tensors that the gradient consists of, in order; None for a single tensor.

        Returns:
            The container and what belongs to it.

        Raises:
            ConfigError: No container can hold the gradient, or `sizes` do not sum to d.
        """
        started = time.perf_counter()
        if self.transform is not None:
            return self._encode_transformed(dense, dense, stream, "float32", None, started)
        indices, values = self.sparsifier.select(dense, Scope.of_gradient(stream, sizes, dense.size))
        encoded = self.pack(dense.size, indices, values, lambda support: dense[support], stream, started=started)
        encoded.write_remainder(dense)
        return encoded

    def _encode_transformed(
        self,
        dense: np.ndarray,
        pending: np.ndarray | None,
        stream: Stream,
        dtype: str,
        shape: tuple[int, ...] | None,
        started: float,
        residual: np.ndarray | None = None,
    ) -> Encoded:
        """Encode the transform's coefficients in place of the gradient.

        What receivers reconstruct is subtracted from the gradient, and the difference is written to `pending` (float32[d],
        which may be `dense` itself), unless that is None. A residual (float32[d]) is added to the gradient before.
        """
        id, parameters = self.transform.id, self.transform.parameters()
        size = self.transform.domain(parameters, dense.size)
        container.check_elements(size)
        selected = select_coefficients(self, dense, residual, pending, Scope(stream, (size,), self.transform.chunk))
        if selected is None:
            return Encoded(container.pack_non_finite(dense.size, dtype), None, None, None, 0, 0, StageClock(started).seconds)
        transformed = time.perf_counter()
        encoded = self.pack(
            size,
            *selected,
            stream,
            dtype=dtype,
            shape=shape,
            started=transformed,
            transformed=(dense.size, (id, parameters)),
        )
        encoded.seconds["transform"] = transformed - started
        if pending is not None and not encoded.non_finite:
            started = time.perf_counter()
            self.transform.subtract(dense if residual is None else pending, encoded.support, encoded.decoded, pending)
            encoded.seconds["residual"] += time.perf_counter() - started
        return encoded

    def pack(
        self,
        d: int,
        indices: np.ndarray | None,
        values: np.ndarray,
        gather: Callable[[np.ndarray], np.ndarray],
        stream: Stream,
        *,
        dtype: str = "float32",
        shape: tuple[int, ...] | None = None,
        started: float | None = None,
        transformed: tuple[int, tuple[int, bytes] | None] | None = None,
    ) -> Encoded:
        """Encode the selected elements and write the container.

        Args:
            d: Number of elements of the domain that the positions are in.
            indices: The selected positions, uint32[k], strictly ascending; None for all.
            values: The values at these positions, float32[k].
            gather: gather(support) -> float32[k']: called for the values if an index codec rebuilds another support.
            stream: The random numbers of this gradient on this rank.
            dtype: The gradient's dtype as the container names it.
            shape: A shape for the container to store, or None.
            started: When the selection began, in seconds of time.perf_counter; None for now.
            transformed: None if the elements are the gradient's own; else its number of elements and the transform's (id, parameters).

        Returns:
            The container and what belongs to it.

        Raises:
            ConfigError: No container can hold d elements.
        """
        container.check_elements(d)
        given, transform = transformed or (self.elements_of(d), None)
        clock = StageClock(started)
        finite = max_magnitude(values) < NON_FINITE
        clock.lap("select")
        if not finite:
            return Encoded(container.pack_non_finite(given, dtype), None, None, None, 0, 0, clock.seconds)
        index_id, index_section, support = self.encode_index(indices, d, stream)
        sent = values
        if support is not indices:
            values = gather(support)
            if not (self.index.remaps_values and index_id == self.index.id):
                sent = values
            elif max(max_magnitude(sent), max_magnitude(values)) >= HUGE:
                index_id, (index_section, support), values = RawIndex.id, RawIndex().encode(indices, d), sent
        clock.lap("index")
        if self.sparsifier.unbiased:
            sent = scaled(sent, d)
        value_codec, value_section, order = self.encode_values(sent, stream, with_order=index_id != Keys.id)
        index_section, sent_order = Keys.following(index_id, index_section, order)
        clock.lap("value")
        blob = container.pack(
            given,
            values.size,
            index_id,
            index_section,
            value_codec.id,
            value_section,
            order=sent_order,
            dtype=dtype,
            shape=shape,
            transform=transform,
        )
        clock.lap("container")
        decoded = as_received(sent, value_codec, value_section, order)
        clock.lap("residual")
        return Encoded(
            blob,
            support,
            values,
            decoded,
            index_section.size,
            value_section.size,
            clock.seconds,
            registry.by_id("index", index_id).name if index_id else None,
        )

    def elements_of(self, d: int) -> int:
        """Return how many elements the gradient has of which d elements are encoded.

        Args:
            d: Number of elements that are encoded, without a transform.

        Returns:
            The number that the container names: d, except where these are some rows of a table.
        """
        return d

    def encode_index(self, indices: np.ndarray | None, d: int, stream: Stream) -> tuple[int, np.ndarray, np.ndarray | None]:
        """Encode the positions, with the raw codec where the index codec would need more bytes.

        Args:
            indices: uint32[k], strictly ascending; None for all positions.
            d: Number of elements of the domain that the positions are in.
            stream: The random numbers of this gradient on this rank.

        Returns:
            The codec's id in the container (0: all positions), the section uint8[m], and the support uint32[k'] that
            receivers rebuild (None: all positions).
        """
        if indices is None or not indices.size:
            return 0 if indices is None else RawIndex.id, _EMPTY, indices
        if self.sparsifier.shared and self.index.name in ("auto", Shared.name):
            codec, section, support = Shared, Shared.section(stream.shared().key()), indices
        else:
            codec = self.index.choose(indices, d)  # type: ignore[assignment]
            section, support = codec.encode(indices, d)  # type: ignore[call-arg]
        if section.size > 4 * indices.size:
            return RawIndex.id, *RawIndex().encode(indices, d)
        return codec.id, section, support

    def encode_values(
        self, values: np.ndarray, stream: Stream, with_order: bool = True
    ) -> tuple[ValueCodec, np.ndarray, np.ndarray | None]:
        """Encode values, with the raw codec where the value codec would need more bytes.

        Args:
            values: float32[k].
            stream: The random numbers of this gradient on this rank.
            with_order: Whether an order is sent as a section of its own.

        Returns:
            The codec, the section uint8[m], and the order of the values, uint32[k], or None.
        """
        if not values.size:
            return self.value, _EMPTY, None
        section, order = self.fitted_value.encode(values, stream)
        order_bytes = (values.size * container.order_width(values.size) + 7) // 8
        if section.size + (order_bytes if with_order and order is not None else 0) >= 4 * values.size:
            return RawValue(), *RawValue().encode(values, stream)
        return self.value, section, order

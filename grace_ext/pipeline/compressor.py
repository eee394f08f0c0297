"""The pipeline: dense gradient -> transform, sparsifier -> index codec + value codec -> container. Back: decoder.py."""

import dataclasses
import time

import numpy as np

from .. import registry
from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError
from ..index.base import IndexCodec
from ..index.raw import RawIndex
from ..index.shared import Shared
from ..kernels import max_magnitude, write_error
from ..kernels.topk import NON_FINITE
from ..sparsifiers.base import Scope, Sparsifier
from ..transforms.base import Transform
from ..value.base import ValueCodec
from ..value.raw import RawValue
from . import container, spec
from .decoder import reorder

_EMPTY = np.empty(0, np.uint8)
_HUGE = NON_FINITE - (2 << 23)  # bits of 2**126: from there on the difference of two values may overflow into the residual


@dataclasses.dataclass
class Encoded:
    """A container and what the sender knows about it.

    support: uint32[k] or None for all; values and decoded: float32[k], the gradient there and what receivers get. All
    three are None in a non-finite container, and lie in scratch arrays of the thread: valid until its next call.
    seconds: time per stage. index_codec: the name of the codec of the index section, None if there is no such section.
    """

    blob: np.ndarray
    support: np.ndarray | None
    values: np.ndarray | None
    decoded: np.ndarray | None
    index_bytes: int
    value_bytes: int
    seconds: dict[str, float]
    index_codec: str | None = None

    @property
    def non_finite(self) -> bool:
        return self.values is None


class Compressor:
    """What a spec describes. Stateless: the same gradient, seed, name, step and rank give the same bytes.

    Raises ConfigError for an unknown stage or option, and for a gradient that no container can hold.
    """

    #: The method, in a LowRankCompressor.
    lowrank = None

    def __init__(self, stages: dict[str, registry.Stage], seed: int = 0):
        self.transform: Transform | None = stages.get("transform")
        self.sparsifier: Sparsifier = stages["sparsifier"]
        self.index: IndexCodec = stages["index"]
        self.value: ValueCodec = stages["value"]
        self.seed = _checked(seed)
        if self.sparsifier.needs_chunks and self.transform is None:
            raise ConfigError(f"{self.sparsifier} needs a transform before it: there are no chunks")
        if self.value.needs_chunks and not self.sparsifier.needs_chunks:
            raise ConfigError(
                f"{self.value} needs a sparsifier that sends as many values of each of a transform's chunks, "
                f"like topk:per=chunk, and not {self.sparsifier}"
            )
        self._value = self.value
        if self.value.needs_chunks:
            self._value = self.value.for_chunks(self.sparsifier.count(self.transform.chunk))
        if not (self.index.universal or self.sparsifier.shared):
            raise ConfigError(
                f"index codec {self.index.name!r} is for positions that all ranks draw alike, as randomk "
                f"does, not for those of {self.sparsifier.name!r}"
            )

    @property
    def stages(self) -> dict[str, registry.Stage]:
        stages = {"transform": self.transform, "sparsifier": self.sparsifier, "index": self.index, "value": self.value}
        return {kind: stage for kind, stage in stages.items() if stage is not None}

    @property
    def dense(self) -> bool:
        """Whether every element is sent as it is in the gradient."""
        return self.sparsifier.name == "dense" and self.transform is None

    @property
    def reducible_dtype(self) -> str | None:
        """The dtype in which values could be summed by an allreduce instead ("float32", "float16"), or None."""
        return self.value.reducible_dtype if self.dense or self.sparsifier.shared and self.transform is None else None

    @property
    def exact(self) -> bool:
        """Whether an allreduce of its values is that of the plain gradients: nothing is compressed."""
        return self.dense and self.reducible_dtype == "float32"

    @property
    def lossless(self) -> bool:
        """Whether what is sent is sent exactly (a sparsifier still leaves out the rest)."""
        return self.index.lossless and self.value.lossless and not self.unbiased

    @property
    def unbiased(self) -> bool:
        """Whether values are sent larger than they are, to make up for those that are not sent."""
        return self.sparsifier.unbiased

    def __str__(self):
        return spec.to_string(self.stages)

    def __repr__(self):
        return f"grace_ext.compressor({str(self)!r}, seed={self.seed})"

    def __eq__(self, other):
        return isinstance(other, Compressor) and (self.stages, self.seed) == (other.stages, other.seed)

    def __hash__(self):
        return hash((str(self), self.seed))

    def to_dict(self) -> dict:
        """The spec as a dict, ready for JSON; `grace_ext.compressor` takes it back."""
        return spec.to_dict(self.stages)

    def compress(self, gradient, *, name: str = "", step: int = 0, rank: int = 0, shape: bool = False) -> np.ndarray:
        """gradient: float of any shape -> container uint8[m]. shape=True stores the shape as well."""
        dense, dtype = as_dense(gradient)
        stored_shape = np.shape(gradient) if shape else None
        return self.encode(dense, Stream(self.seed, name, step, rank), dtype=dtype, shape=stored_shape).blob

    def encode(self, dense: np.ndarray, stream: Stream, *, sizes=None, dtype="float32", shape=None) -> Encoded:
        """Like compress for a float32[d], returning all that the sender knows about the container.

        sizes: the elements of the tensors that it is made of; None for one tensor.
        """
        started = time.perf_counter()
        if self.transform is not None:
            return self._encode_transformed(dense, None, stream, dtype, shape, started)
        indices, values = self.sparsifier.select(dense, _scope(stream, sizes, dense.size))
        return self.pack(
            dense.size, indices, values, lambda support: dense[support], stream, dtype=dtype, shape=shape, started=started
        )

    def encode_compensated(self, gradient, residual, pending, stream: Stream, *, sizes=None, dtype="float32") -> Encoded:
        """Encode gradient + residual and write what the container does not carry to `pending`. All float32[d].

        The same bytes and the same residual as adding, encoding and subtracting the decoded container, in one pass less.
        If gradient + residual is not finite, pending is of no use.
        """
        started = time.perf_counter()
        if self.transform is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # seen by the transformed road
                np.add(gradient, residual, out=pending)
            return self._encode_transformed(pending, pending, stream, dtype, None, started)
        indices, values = self.sparsifier.select_compensated(
            gradient, residual, pending, _scope(stream, sizes, gradient.size)
        )
        if indices is None:
            values = pending
        encoded = self.pack(
            gradient.size, indices, values, lambda support: pending[support], stream, dtype=dtype, started=started
        )
        return _leave_rest(encoded, pending)

    def encode_in_place(self, dense, stream: Stream, *, sizes=None) -> Encoded:
        """Encode float32[d] and leave in it what the container does not carry. If it is not finite, it is of no use then."""
        started = time.perf_counter()
        if self.transform is not None:
            return self._encode_transformed(dense, dense, stream, "float32", None, started)
        indices, values = self.sparsifier.select(dense, _scope(stream, sizes, dense.size))
        encoded = self.pack(dense.size, indices, values, lambda support: dense[support], stream, started=started)
        return _leave_rest(encoded, dense)

    def _encode_transformed(self, dense, pending, stream, dtype, shape, started) -> Encoded:
        """The transform's coefficients take the place of the gradient; what receivers make of them is subtracted from
        it, the result written to `pending` (float32[d], may be dense itself) unless that is None."""
        if max_magnitude(dense) >= NON_FINITE:
            return Encoded(container.pack_non_finite(dense.size, dtype), None, None, None, 0, 0, _Clock(started).seconds)
        id, parameters = self.transform.id, self.transform.parameters()
        size = self.transform.domain(parameters, dense.size)
        container.check_elements(size)
        coefficients = scratch("coefficients", np.float32, size)
        self.transform.forward(dense, coefficients)
        transformed = time.perf_counter()
        indices, values = self.sparsifier.select(coefficients, Scope(stream, (size,), self.transform.chunk))
        encoded = self.pack(
            size,
            indices,
            values,
            lambda support: coefficients[support],
            stream,
            dtype=dtype,
            shape=shape,
            started=transformed,
            transformed=(dense.size, (id, parameters)),
        )
        encoded.seconds["transform"] = transformed - started
        if pending is not None and not encoded.non_finite:
            started = time.perf_counter()
            restored = scratch("restored", np.float32, size)
            restored[:] = 0
            restored[... if encoded.support is None else encoded.support] = encoded.decoded
            self.transform.inverse(parameters, restored)
            np.subtract(dense, restored[: dense.size], out=pending)
            encoded.seconds["residual"] += time.perf_counter() - started
        return encoded

    def pack(
        self, d, indices, values, gather, stream, *, dtype="float32", shape=None, started=None, transformed=None
    ) -> Encoded:
        """Encode a selection of d elements. indices: uint32[k] or None for all; values: float32[k]; gather(support) ->
        float32[k'] is asked for the values when an index codec rebuilds another support. transformed: if the elements are
        not those of the gradient, how many it has, and the transform's id and parameters, or None."""
        container.check_elements(d)
        given, transform = transformed or (d, None)
        clock = _Clock(started)
        finite = max_magnitude(values) < NON_FINITE
        clock.lap("select")
        if not finite:
            return Encoded(container.pack_non_finite(given, dtype), None, None, None, 0, 0, clock.seconds)
        index_id, index_section, support = self._encode_index(indices, d, stream)
        sent = values
        if support is not indices:
            values = gather(support)
            if not (self.index.remaps_values and index_id == self.index.id):
                sent = values
            elif max(max_magnitude(sent), max_magnitude(values)) >= _HUGE:
                index_id, (index_section, support), values = RawIndex.id, RawIndex().encode(indices, d), sent
        clock.lap("index")
        if self.unbiased:
            sent = scaled(sent, d)
        value_codec, value_section, order = self._encode_values(sent, stream)
        clock.lap("value")
        blob = container.pack(
            given,
            values.size,
            index_id,
            index_section,
            value_codec.id,
            value_section,
            order=order,
            dtype=dtype,
            shape=shape,
            transform=transform,
        )
        clock.lap("container")
        decoded = sent
        if not value_codec.lossless and sent.size:
            decoded = scratch("decoded", np.float32, sent.size)
            value_codec.decode(value_section, decoded)
            decoded = reorder(decoded, order)
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

    def _encode_index(self, indices, d, stream) -> tuple[int, np.ndarray, np.ndarray | None]:
        """(container id, section, support) for uint32[k], or for None: all positions."""
        if indices is None:
            return 0, _EMPTY, None
        if not indices.size:
            return RawIndex.id, _EMPTY, indices
        if self.sparsifier.shared and self.index.name in ("auto", Shared.name):
            codec, section, support = Shared, Shared.section(stream.shared().key()), indices
        else:
            codec = self.index.choose(indices, d)
            section, support = codec.encode(indices, d)
        if section.size > 4 * indices.size:
            return RawIndex.id, *RawIndex().encode(indices, d)
        return codec.id, section, support

    def _encode_values(self, values, stream) -> tuple[ValueCodec, np.ndarray, np.ndarray | None]:
        """(codec used, section, order) for float32[k]."""
        if not values.size:
            return self.value, _EMPTY, None
        section, order = self._value.encode(values, stream)
        order_bytes = 0 if order is None else (values.size * container.order_width(values.size) + 7) // 8
        if section.size + order_bytes >= 4 * values.size:
            return RawValue(), *RawValue().encode(values, stream)
        return self.value, section, order


def _leave_rest(encoded: Encoded, pending: np.ndarray) -> Encoded:
    """pending: float32[d], what was encoded without a transform; what the container does not carry is left in it."""
    started = time.perf_counter()
    if not encoded.non_finite:
        if encoded.support is None:
            np.subtract(encoded.values, encoded.decoded, out=pending)
        else:
            write_error(pending, encoded.support, encoded.values, encoded.decoded)
    encoded.seconds["residual"] = encoded.seconds.get("residual", 0.0) + time.perf_counter() - started
    return encoded


def _scope(stream: Stream, sizes, d: int) -> Scope:
    scope = Scope(stream, (d,) if sizes is None else tuple(sizes))
    if sum(scope.sizes) != d:
        raise ConfigError(f"sizes: the tensors have {sum(scope.sizes)} elements, the gradient {d}")
    return scope


class LowRankCompressor(Compressor):
    """A low-rank spec ("powersgd:4"). It makes no containers: an Exchange sums its factors by allreduce."""

    lossless, dense, unbiased, reducible_dtype, transform = False, False, False, None, None

    def __init__(self, stages: dict[str, registry.Stage], seed: int = 0):
        self.lowrank = stages["lowrank"]
        self.seed = _checked(seed)

    @property
    def stages(self):
        return {"lowrank": self.lowrank}

    def _no_container(self, *_, **__):
        raise ConfigError(
            f"{str(self)!r} makes no container: its factors are summed by allreduce, inside an adapter's "
            f"exchange; compress() needs a spec with a sparsifier"
        )

    compress = encode = encode_compensated = pack = _no_container


def _checked(seed: int) -> int:
    if not -(2**63) <= int(seed) < 2**63:
        raise ConfigError(f"seed={seed}; allowed: integers of 64 bits")
    return int(seed)


class _Clock:
    def __init__(self, started):
        self.last = time.perf_counter() if started is None else started
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self.last = now - self.last, now


def scaled(values: np.ndarray, d: int) -> np.ndarray:
    """float32[k] times d / k: unbiased if each of d elements is among them with probability k / d. Stays finite."""
    limit = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        return np.clip(values * np.float32(d / max(1, values.size)), -limit, limit)


def as_dense(gradient) -> tuple[np.ndarray, str]:
    """A gradient of any shape and float type as float32[d] (a view where it can be), and the name of its dtype."""
    array = np.asarray(gradient)
    if array.dtype.name not in container.DTYPES:
        raise ConfigError(f"a gradient is one of {', '.join(container.DTYPES)}, not {array.dtype}")
    container.check_elements(array.size)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf and the container says so
        return np.ascontiguousarray(array, np.float32).reshape(-1), array.dtype.name


def make_compressor(compression, seed: int = 0) -> Compressor:
    """A Compressor from a spec string, a spec dict, or a Compressor (returned as it is)."""
    if isinstance(compression, Compressor):
        return compression
    stages = spec.parse(compression)
    return (LowRankCompressor if "lowrank" in stages else Compressor)(stages, seed)

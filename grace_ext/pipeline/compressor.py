"""Compressors: what a spec describes. Encoding is in encoder.py, decoding in decoder.py."""

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .. import registry
from .._util.arguments import checked_integer, checked_text
from .._util.rng import Stream, checked_seed
from ..errors import ConfigError
from . import container, spec
from .encoder import Encoder


class Compressor(Encoder):
    """The stages that a spec describes, as one object that compresses gradients.

    A compressor keeps no state: the same gradient, seed, name, step and rank give the same bytes on every machine. The
    exception is the value codec deflate with level 1, whose bytes depend on which library is installed, and with higher levels
    on the version of zlib.

    Args:
        stages: The stages by kind: "sparsifier", "index", "value" and, optionally, "transform".
        seed: Seed of all random choices, an integer of 64 bits.

    Raises:
        ConfigError: The stages do not fit together, or the seed is out of range.
    """

    #: The low-rank method; only a LowRankCompressor has one.
    lowrank: Any = None

    @property
    def stages(self) -> dict[str, registry.Stage]:
        """The stages by kind, in the order in which a spec names them; kinds that are not in use are left out."""
        stages = {"transform": self.transform, "sparsifier": self.sparsifier, "index": self.index, "value": self.value}
        return {kind: stage for kind, stage in stages.items() if stage is not None}

    @property
    def dense(self) -> bool:
        """Whether every element of the gradient is sent, untransformed."""
        return self.sparsifier.name == "dense" and self.transform is None

    @property
    def reducible_dtype(self) -> str | None:
        """The dtype in which an allreduce could sum the values instead ("float32" or "float16"), or None."""
        return self.value.reducible_dtype if self.dense or self.sparsifier.shared and self.transform is None else None

    @property
    def exact(self) -> bool:
        """Whether an allreduce of the values gives the same sum as one of the gradients: nothing is compressed."""
        return self.dense and self.reducible_dtype == "float32"

    @property
    def lossless(self) -> bool:
        """Whether the selected values are sent exactly (a sparsifier still leaves out all others)."""
        return self.index.lossless and self.value.lossless and not self.unbiased

    @property
    def has_density(self) -> bool:
        """Whether the spec has a density, which schedules and policies can choose."""
        return "density" in self.sparsifier.options()

    @property
    def density(self) -> float:
        """The share of the elements that is selected; 0 where the spec has no such option."""
        return getattr(self.sparsifier, "density", 0.0)

    @property
    def takes_parts(self) -> bool:
        """Whether a gradient with a residual can be encoded from several arrays, without a copy of it in one."""
        return self.transform is None and self.sparsifier.takes_parts

    @property
    def unbiased(self) -> bool:
        """Whether the values are scaled up to make up for those that are not sent."""
        return self.sparsifier.unbiased

    @functools.cached_property
    def _spec(self) -> str:
        return spec.to_string(self.stages)

    def __str__(self) -> str:
        return self._spec

    def __repr__(self) -> str:
        return f"grace_ext.compressor({str(self)!r}, seed={self.seed})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compressor) and (self.stages, self.seed) == (other.stages, other.seed)

    def __hash__(self) -> int:
        return hash((str(self), self.seed))

    def to_dict(self) -> dict:
        """Return the spec as a dict that JSON can hold.

        Returns:
            kind -> {"name": name, option: value, ...}; `grace_ext.compressor` takes it back.
        """
        return spec.to_dict(self.stages)

    def compress(
        self, gradient: npt.ArrayLike, *, name: str = "", step: int = 0, rank: int = 0, shape: bool = False
    ) -> np.ndarray:
        """Compress a gradient into a container.

        Args:
            gradient: Array of any shape, float32, float16, bfloat16 or float64.
            name: Name of the tensor; it selects the random numbers, together with the seed, `step` and `rank`.
            step: Number of the training step, an integer of 64 bits.
            rank: Number of the rank, an integer of 64 bits.
            shape: Whether the container stores the gradient's shape.

        Returns:
            The container, uint8[m].

        Raises:
            ConfigError: No container can hold the gradient: its dtype is another one, or it or its shape is too large. Or the
                name is no str, or `step` or `rank` no integer of 64 bits.
        """
        stream = Stream(self.seed, checked_text("name", name), checked_integer("step", step), checked_integer("rank", rank))
        dense, dtype = as_dense(gradient)
        stored_shape = np.shape(gradient) if shape else None
        return self.encode(dense, stream, dtype=dtype, shape=stored_shape).blob


class LowRankCompressor(Compressor):
    """A low-rank spec such as "powersgd:4". It makes no containers: an exchange sums its factors by allreduce.

    Args:
        stages: The stage of kind "lowrank".
        seed: Seed of all random choices, an integer of 64 bits.
    """

    lossless, dense, unbiased, has_density, reducible_dtype, transform = False, False, False, False, None, None
    takes_parts, density = False, 0.0

    def __init__(self, stages: Mapping[str, Any], seed: int = 0):
        self.lowrank = stages["lowrank"]
        self.seed = checked_seed(seed)

    @property
    def stages(self) -> dict[str, registry.Stage]:
        return {"lowrank": self.lowrank}

    def _no_container(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{str(self)!r} makes no container: its factors are summed by allreduce, inside an adapter's "
            f"exchange; compress() needs a spec with a sparsifier"
        )

    compress = encode = encode_compensated = encode_in_place = encode_index = pack = _no_container


def as_dense(gradient: npt.ArrayLike) -> tuple[np.ndarray, str]:
    """Return a gradient as a flat float32 array.

    Args:
        gradient: Array of any shape, float32, float16, bfloat16 or float64.

    Returns:
        float32[d], a view where that is possible, and the name of the gradient's dtype.

    Raises:
        ConfigError: The dtype is another one, or the array has more elements than a container can hold.
    """
    array = np.asarray(gradient)
    if array.dtype.name not in container.DTYPES:
        raise ConfigError(f"a gradient is one of {', '.join(container.DTYPES)}, not {array.dtype}")
    container.check_elements(array.size)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf, and the container a non-finite one
        return np.ascontiguousarray(array, np.float32).reshape(-1), array.dtype.name


def make_compressor(compression: str | dict | Compressor, seed: int = 0) -> Compressor:
    """Make a compressor from its spec.

    Args:
        compression: A spec string ("topk:0.01/rice/qsgd:7"), its dict form, or a Compressor, which is returned as it is.
        seed: Seed of all random choices, an integer of 64 bits.

    Returns:
        The compressor.

    Raises:
        ConfigError: A stage or option is unknown, the stages do not fit together, or the seed is no integer of 64 bits.
    """
    if isinstance(compression, Compressor):
        return compression
    stages = spec.parse(compression)
    return (LowRankCompressor if "lowrank" in stages else Compressor)(stages, seed)

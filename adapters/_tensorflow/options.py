"""The options of the TensorFlow wrappers, and when two sets of them are the same."""

import dataclasses
import os
import types

import horovod.tensorflow as hvd

from grace_ext import ConfigError
from grace_ext.pipeline.compressor import Compressor
from grace_ext.registry import Stage

from .._horovod.options import HorovodOptions


@dataclasses.dataclass
class Options(HorovodOptions):
    """The options of DistributedGradientTape and DistributedOptimizer."""

    op: object = hvd.Average
    process_set: object = hvd.global_process_set
    scale_local_gradients: bool = True
    device_dense: str = ""
    device_sparse: str = ""

    hvd = hvd
    absent = ("selection", "on_resize", "grad_scaler", "num_groups", "backward_passes_per_step")

    def __post_init__(self):
        super().__post_init__()
        if self.device_dense or self.device_sparse:
            raise ConfigError("device_dense, device_sparse: the codecs run on the host; only '' is allowed")

    def key(self) -> tuple:
        """By field; equal for equal options. Variables, process sets, captures and observers are told apart, not looked
        into; functions by their code, since a loop may make the same one at every step."""
        known = str | int | float | os.PathLike | Compressor | Stage | None

        def part(value):
            if isinstance(value, list | tuple):
                return tuple(map(part, value))
            if isinstance(value, dict):
                return tuple((name, part(option)) for name, option in value.items())
            if isinstance(value, types.MethodType):
                return _Itself(value.__self__), part(value.__func__)
            if isinstance(value, types.FunctionType):
                cells = [cell.cell_contents for cell in value.__closure__ or ()]
                return value.__code__, part(value.__defaults__), part(cells)
            return repr(value) if isinstance(value, known) else _Itself(value)

        return tuple(part(getattr(self, field.name)) for field in dataclasses.fields(self))

    def recreated_option(self, other: "Options") -> str | None:
        """The name of an option that holds another object of the same class than `other`'s, where nothing else differs; None
        if there is none. For options that a loop may make at every step, and that say nothing of what is exchanged with
        whom."""
        parts = zip(dataclasses.fields(self), self.key(), other.key(), strict=True)
        differing = [(field.name, own, others) for field, own, others in parts if own != others]
        alike = all(name not in ("process_set", "groups") and _alike(own, others) for name, own, others in differing)
        return differing[0][0] if differing and alike else None


class _Itself:
    """An object as a part of a key: equal to itself alone."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _alike(one, other) -> bool:
    """Whether parts of keys differ only in which objects of a class they hold."""
    if isinstance(one, _Itself) and isinstance(other, _Itself):
        return type(one.value) is type(other.value)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_alike, one, other))
    return one == other

"""Gradients of TensorFlow variables through the exchange: in eager code, in tf.function and in Keras' fit."""

import dataclasses
import math
import os
import re
import types

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from grace_ext import ConfigError
from grace_ext.exchange import checkpoint
from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.observe import parse_observers, warn_of_one_rank
from grace_ext.observe.capture import Capture
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import DEFAULT_SPEC, Rules
from grace_ext.registry import Stage

from .._common.stalls import check_config_digests
from .._horovod.exits import guard_exit
from .._horovod.options import check_reduction, group_names, prefix_of, understand_compression, weight_of
from .exchange_graph import CallersThread, ExchangeGraph
from .saved_state import Restore
from .transport import GraphTransport


@dataclasses.dataclass
class Options:
    """What DistributedGradientTape and DistributedOptimizer have in common; see horovod_tensorflow.

    Raises ConfigError for what cannot be honoured.
    """

    compression: object = DEFAULT_SPEC
    memory: object = "residual"
    communicator: object = "allgather"
    rules: dict | None = None
    bucket_bytes: int = 25 * 2**20
    groups: object = None
    op: object = hvd.Average
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: object = hvd.global_process_set
    scale_local_gradients: bool = True
    seed: int = 0
    capture: object = None
    schedule: dict | None = None
    observe: object = None

    def __post_init__(self):
        check_reduction(hvd, self.op, self.gradient_predivide_factor)
        self.compression, self.memory, self.communicator = understand_compression(
            hvd, self.compression, self.memory, self.communicator
        )

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

    def made_anew(self, other: "Options") -> str | None:
        """The name of an option that holds another object of the same class than `other`'s, where nothing else differs; None
        if there is none. For options that a loop may make at every step, and that say nothing of what is exchanged with
        whom."""
        names = [field.name for field in dataclasses.fields(self)]
        differing = [
            (name, own, others) for name, own, others in zip(names, self.key(), other.key(), strict=True) if own != others
        ]
        if all(name not in ("process_set", "groups") and _alike(own, others) for name, own, others in differing):
            return differing[0][0] if differing else None
        return None


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


class Reducer:
    """Exchanges the gradients of one set of variables, step after step; keeps their memory and their counts."""

    def __init__(self, options: Options):
        self._options = options
        process_set = options.process_set
        #: Whether there is anybody to exchange with.
        self.active = process_set.included() and process_set.size() > 1
        self._layouts: dict[tuple, _Layout] = {}
        self._restore: Restore | None = None
        guard_exit(hvd)
        #: Shared by the layouts. They are made here and not in Options: a path is known again in another tape's options.
        self._capture, self._observers = parse_observers(options.capture, options.observe)
        if not self.active:
            warn_of_one_rank(self._capture, self._observers, stacklevel=3)

    def reduce(self, gradients: list, variables: list, local=()) -> list:
        """Gradients (tf.Tensor, tf.IndexedSlices or None) of the variables, in their order -> the same, averaged over ranks
        (or summed), in the gradients' dtypes. Eagerly or in a graph; call it in the same order on all ranks.

        local: variables whose gradients are not exchanged, but divided by the number of ranks with scale_local_gradients.

        Raises ConfigError for gradients that are not real floating-point numbers, for shapes that are not known, if ranks
        differ in their variables or options, and where XLA compiles the step or TensorFlow 1 builds a graph for a session.
        """
        if not self.active:
            return list(gradients)
        check_not_compiled()
        if local:
            return self._reduce_shared(gradients, variables, {id(variable) for variable in local})
        names = _unique([name_of(variable) for variable in variables])
        given = {
            name: self._checked(name, gradient, variable)
            for name, gradient, variable in zip(names, gradients, variables, strict=True)
            if gradient is not None
        }
        if not given:
            return list(gradients)
        layout = self._layout(given, dict(zip(names, variables, strict=True)))
        reduced = layout.run_eagerly(given) if tf.executing_eagerly() else layout.graph.add(given)
        return [_like(gradient, reduced.get(name)) for name, gradient in zip(names, gradients, strict=True)]

    def _reduce_shared(self, gradients, variables, local: set[int]) -> list:
        """Only those that are not local."""
        shared = [i for i, variable in enumerate(variables) if id(variable) not in local]
        reduced = self.reduce([gradients[i] for i in shared], [variables[i] for i in shared])
        scale = 1 / self._options.process_set.size() if self._options.scale_local_gradients else 1.0
        result = [_scaled(gradient, scale) for gradient in gradients]
        for i, gradient in zip(shared, reduced, strict=True):
            result[i] = gradient
        return result

    def _checked(self, name, gradient, variable):
        if isinstance(gradient, tf.IndexedSlices):
            dense = self._options.sparse_as_dense
            shape = tf.constant(tuple(variable.shape)) if dense else None  # a TensorShape cannot become a node of a graph
            gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
            gradient = tf.convert_to_tensor(gradient) if dense else gradient
        if not gradient.dtype.is_floating:
            raise ConfigError(f"the gradient of {name!r} is {gradient.dtype.name}; gradients must be real floating point")
        return gradient

    def _layout(self, given: dict, variables: dict) -> "_Layout":
        tables = {name for name, gradient in given.items() if isinstance(gradient, tf.IndexedSlices)}
        key = tuple((name, gradient.dtype, name in tables or tuple(gradient.shape)) for name, gradient in given.items())
        if key not in self._layouts:
            common = dict(zip(variables, common_names(list(variables)), strict=True))
            tensors = [_tensor(name, gradient, variables[name], common[name]) for name, gradient in given.items()]
            with tf.init_scope():
                float32 = {name for name, gradient in given.items() if gradient.dtype == tf.float32}
                self._layouts[key] = _Layout(
                    self._options,
                    tensors,
                    tables,
                    float32,
                    {id(variable): name for name, variable in variables.items()},
                    self._capture,
                    self._observers,
                )
            self._restored(self._layouts[key])
        return self._layouts[key]

    def _restored(self, layout: "_Layout") -> None:
        if self._restore is not None:
            self._restore.into(layout.exchange, layout.names)

    def state_dict(self) -> dict:
        """This rank's state between two steps: see saved_state."""
        if not self.active:
            return {"rank": 0, "ranks": 1, "layouts": []}
        process_set = self._options.process_set
        rank, ranks = process_set.rank(), process_set.size()
        waiting = self._restore.waiting() if self._restore else []
        return {
            "rank": rank,
            "ranks": ranks,
            "layouts": [
                *(
                    checkpoint.pack(layout.exchange.state_dict(), rank, ranks, layout.names)
                    for layout in self._layouts.values()
                ),
                *waiting,
            ],
        }

    def load_state_dict(self, states, on_resize=None) -> dict | None:
        """A collective: go on from what state_dict returned, on all ranks, now or in the first step. See Restore. Returns
        this rank's "passes", if all ranks can go on with theirs."""
        if not self.active:
            return states["passes"] if isinstance(states, dict) and states["ranks"] == 1 and "passes" in states else None
        self._restore = Restore(states, self._options.process_set, on_resize)
        for layout in self._layouts.values():
            self._restored(layout)
        return self._restore.passes

    def made_anew(self, options: Options) -> str | None:
        """Which of these options is another object than this reducer's: see Options.made_anew."""
        return options.made_anew(self._options)

    def stats(self) -> dict:
        """See grace_ext.exchange.Exchange.stats; {"steps": 0} before the first exchange and when there is one rank."""
        if not self._layouts:
            return {"steps": 0}
        last, *others = sorted(self._layouts.values(), key=lambda layout: layout.graph.idle_since, reverse=True)
        return last.exchange.stats(*(layout.exchange for layout in others))


class _Layout:
    """The buckets of certain gradients, in the reverse order of their variables: about that in which backward makes them."""

    def __init__(
        self,
        options: Options,
        tensors: list[Tensor],
        tables: set[str],
        float32: set[str],
        names: dict[int, str],
        capture: Capture | None,
        observe: list,
    ):
        """tables: the names of those whose gradients come as rows; each has a bucket of its own. float32: of those with
        gradients of that dtype. names: by id of the variable."""
        process_set = options.process_set
        weight = weight_of(hvd, options.op, options.gradient_predivide_factor, process_set.size())
        self.exchange = Exchange(
            GraphTransport(process_set),
            options.memory,
            weight,
            options.seed,
            capture,
            CallersThread(),
            options.schedule,
            observe=observe,
        )
        rules = Rules(options.compression, options.rules, options.seed)
        communicator = parse_stage("communicator", options.communicator)
        self.names = [tensor.name for tensor in tensors]
        self.exchange.set_buckets(
            build_buckets(
                self.exchange,
                [tensors[::-1]],
                tables,
                rules,
                communicator,
                prefix_of(process_set),
                options.bucket_bytes,
                group_names(options.groups, names),
            )
        )
        for bucket in self.exchange.buckets:
            bucket.may_bypass = float32.issuperset(tensor.name for tensor in bucket.tensors)
        check_config_digests(
            self.exchange, lambda digest: hvd.allgather(tf.constant(digest), process_set=process_set).numpy()
        )
        self.graph = ExchangeGraph(self.exchange, process_set, 1.0 / options.gradient_predivide_factor)
        self._function = None

    def run_eagerly(self, given: dict) -> dict:
        """As a graph as well: there Horovod's operations have names and overlap."""
        if self._function is None:
            self._function = tf.function(self.graph.add).get_concrete_function(
                {name: _spec(gradient) for name, gradient in given.items()}
            )
        self.graph.error = None
        try:
            return self._function(given)
        except tf.errors.OpError:
            if self.graph.error is not None:
                raise self.graph.error from None
            raise


def check_not_compiled() -> None:
    """Raises ConfigError inside a function that XLA compiles, because a compiled step can call neither Horovod nor the
    codecs, and without eager execution, which the first step needs."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigError("sessions of TensorFlow 1 are not supported: leave eager execution enabled")
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "XLA compiles this training step, and a compiled step cannot exchange gradients: switch it off "
            "with model.compile(..., jit_compile=False) (Keras 3 compiles by itself on a GPU: "
            "jit_compile='auto'), or in your own loop with @tf.function(jit_compile=False)"
        )


def check_devices(device_dense: str, device_sparse: str) -> None:
    """Horovod's arguments. Raises ConfigError unless they are empty."""
    if device_dense or device_sparse:
        raise ConfigError("device_dense, device_sparse: the codecs run on the host; only '' is allowed")


def name_of(variable) -> str:
    """A variable's name: its path in Keras 3, the name without ":0" elsewhere, "source" for tensors."""
    return getattr(variable, "path", None) or getattr(variable, "name", "source").removesuffix(":0")


def _unique(names: list[str]) -> list[str]:
    """Names that are there twice get a number."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return unique


def common_names(names: list[str]) -> list[str]:
    """The same names on ranks that made other layers before: Keras calls a layer without a name dense_2 if the process has
    made two of the class before. Here such numbers count what is in the list: dense, dense_1, and so on."""
    numbers: dict[str, list[str]] = {}

    def counted(part: str) -> str:
        base, number = re.fullmatch(r"(.*?)(_\d+)?", part, re.DOTALL).groups(default="")
        known = numbers.setdefault(base, [])
        if number not in known:
            known.append(number)
        place = known.index(number)
        return f"{base}_{place}" if place else base

    return ["/".join(map(counted, name.split("/"))) for name in names]


def _tensor(name: str, gradient, variable, common_name: str) -> Tensor:
    shape = variable.shape if isinstance(gradient, tf.IndexedSlices) else gradient.shape
    if not tf.TensorShape(shape).is_fully_defined():
        raise ConfigError(f"the gradient of {name!r} has the shape {shape}; it must be fully known")
    return Tensor(name, math.prod(shape), len(shape), shape=tuple(shape), common_name=common_name)


def _spec(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlicesSpec(dtype=gradient.dtype, indices_dtype=gradient.indices.dtype)
    return tf.TensorSpec(gradient.shape, gradient.dtype)


def _like(gradient, reduced):
    """The result in the gradient's dtype."""
    if isinstance(reduced, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(reduced.values, gradient.dtype), reduced.indices, gradient.dense_shape)
    return None if gradient is None else tf.cast(reduced, gradient.dtype)


def _scaled(gradient, scale: float):
    if gradient is None or scale == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * tf.cast(scale, gradient.dtype), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(scale, gradient.dtype)

"""Gradients summed over several calls, in eager code and in graphs: Horovod's backward_passes_per_step."""

import tensorflow as tf

# Variables that a tf.function makes when it is traced once more: tf.Variable refuses.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from grace_ext import ConfigError

from .names import name_of, unique

#: Sets of variables that get gradients apart from each other, in a graph, beside those of the call: each doubles the graph.
_MOST_GROUPS = 3
_UNKNOWN = (
    "backward_passes_per_step: an earlier call has summed gradients of other variables than the calls of which this tf.function "
    "knew when it was traced. Give all variables a gradient in each function, as with tape.gradient(..., "
    "unconnected_gradients='zero'), or call the optimizer eagerly"
)


class Accumulator:
    """Sums the gradients of `passes` calls. average: divide the sum by their number. sparse_as_dense: sum IndexedSlices as
    dense tensors, else their rows are kept one after the other.

    The sum of a variable is dense or consists of rows, as its first gradient is; gradients of the other kind are converted.
    What earlier calls have summed is applied whether or not the variable has a gradient in the last call. A graph knows the
    sums that there are when it is traced, and makes one for each variable of the call."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool):
        self.passes = passes
        self._scale = 1 / passes if average else 1.0
        self._sparse_as_dense = sparse_as_dense
        self._sums: dict[int, _Sum] = {}  # by id of the variable
        self._patterns: list[frozenset] = []  # keys of the sums that a call adds to, of all calls traced
        self._calls: tf.Variable | None = None
        self._filled: tf.Variable | None = None  # how many sums hold something
        self._loaded: dict = {"calls": 0, "sums": []}  # for variables that are not made yet

    def call(self, gradients, variables, apply, skip) -> None:
        """At every passes-th call apply(sums, variables), lists of all variables of the call and of those that earlier calls
        have summed something of; else skip()."""
        if self.passes == 1:
            apply(gradients, variables)
            return
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if self._calls is None:
            with tf.init_scope():
                self._calls = _variable(tf.constant(self._loaded["calls"], tf.int64), name="backward_passes")
                self._filled = _variable(tf.constant(len(self._loaded["sums"]), tf.int64))
        own = self._sums_of(gradients, variables)
        pattern = frozenset(own)
        if pattern not in self._patterns:
            self._patterns.append(pattern)
        known, groups = dict(self._sums), self._groups(own)  # of this call; later ones may add some

        def apply_sums():
            with tf.control_dependencies(self._check_known(known, groups)):
                self._apply_with(own, [], groups, variables, apply)

        def add():
            for total, gradient in own.values():
                self._filled.assign_add(tf.cast(tf.logical_not(total.filled), tf.int64))
                total.add(gradient)
            skip()

        calls = self._calls.assign_add(1)
        tf.cond(tf.equal(calls % self.passes, 0), apply_sums, add)

    def _sums_of(self, gradients, variables) -> dict:
        """By key, the sum that each gradient of a call belongs to, and the gradient. Makes the sums that there are not yet."""
        own = {}
        names = unique([name_of(variable) for variable in variables])
        self._name_loaded(names, [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None])
        for name, gradient, variable in zip(names, gradients, variables, strict=True):
            key, loaded = id(variable), self._take_loaded(name)
            if key not in self._sums and (gradient is not None or loaded is not None or not tf.executing_eagerly()):
                with tf.init_scope():
                    kind = _Rows if isinstance(gradient if loaded is None else loaded, tf.IndexedSlices) else _Dense
                    self._sums[key] = kind(name, variable, gradient)
                    if loaded is not None:
                        self._sums[key].load(loaded)
            if gradient is not None:
                own[key] = self._sums[key], self._sums[key].converted(gradient)
        return own

    def _groups(self, own: dict) -> list[list["_Sum"]]:
        """The other sums, by the calls that add to them: in a graph, those that get gradients in the same calls hold something
        at the same time. Raises ConfigError for more groups than a graph can tell apart."""
        others = {key: total for key, total in self._sums.items() if key not in own}
        if tf.executing_eagerly():
            return [[total] for total in others.values()]
        groups: dict[tuple, list[_Sum]] = {}
        for key, total in others.items():
            groups.setdefault(tuple(key in pattern for pattern in self._patterns), []).append(total)
        if len(groups) > _MOST_GROUPS:
            raise ConfigError(
                f"backward_passes_per_step: {len(groups) + 1} functions have gradients of other variables each; up to "
                f"{_MOST_GROUPS + 1} are allowed in tf.function. Give all variables a gradient in each of them, as with "
                f"tape.gradient(..., unconnected_gradients='zero'), or call apply eagerly"
            )
        return [*groups.values()]

    def _check_known(self, known: dict, groups: list[list["_Sum"]]) -> list:
        """Fails where something was summed that the graph does not know of, and where a group holds something in parts. Returns
        the nodes of the check."""
        unknown = self._filled - tf.add_n([tf.cast(total.filled, tf.int64) for total in known.values()])
        filled = [tf.stack([total.filled.read_value() for total in group]) for group in groups]
        parts = [tf.logical_and(tf.reduce_any(one), tf.logical_not(tf.reduce_all(one))) for one in filled]
        fits = tf.logical_not(tf.reduce_any(tf.stack([unknown > 0, *parts])))
        if not tf.executing_eagerly():
            return [tf.debugging.Assert(fits, [_UNKNOWN])]
        if not fits:
            names = ", ".join(map(repr, self._loaded.get("names", [])))
            raise ConfigError(
                f"backward_passes_per_step: the state that was loaded holds sums of gradients of {names}, and no call since then "
                f"had variables of these names and shapes"
            )
        return []

    def _apply_with(self, own: dict, others: list["_Sum"], groups: list, variables, apply) -> None:
        """Apply the gradients of the call with what was summed, with `others` and those of the groups that hold something."""
        if groups:
            (first, *rest) = groups
            tf.cond(
                tf.reduce_any(tf.stack([total.filled.read_value() for total in first])),
                lambda: self._apply_with(own, [*others, *first], rest, variables, apply),
                lambda: self._apply_with(own, others, rest, variables, apply),
            )
            return
        of = {id(variable): variable for variable in variables} | {id(total.of): total.of for total in others}
        sums = {key: total.take(gradient, self._scale) for key, (total, gradient) in own.items()}
        sums.update({id(total.of): total.take(None, self._scale) for total in others})
        self._filled.assign(0)
        apply([sums.get(key) for key in of], [*of.values()])

    def _name_loaded(self, names: list[str], given: list[str]) -> None:
        """Sums that were saved without names, or of variables that are all called otherwise now, are those of `given`, in their
        order. names: of all variables of the call."""
        count = len(self._loaded["sums"])
        saved = self._loaded.get("names")
        if count and (saved is None or not {*saved} & {*names} and count == len(given)):
            self._loaded["names"] = [*given[:count], *[""] * (count - len(given))]

    def _take_loaded(self, name: str):
        """Remove the sum that was loaded of a variable; as a gradient, None if there is none."""
        if name not in self._loaded.get("names", ()):
            return None
        place = self._loaded["names"].index(name)
        del self._loaded["names"][place]
        arrays = self._loaded["sums"].pop(place)
        with tf.init_scope():  # outside of the graph that is being traced, as the sum
            return tf.constant(arrays[0]) if len(arrays) == 1 else tf.IndexedSlices(*map(tf.constant, arrays))

    def state_dict(self) -> dict | None:
        """{"calls": since the last sums, "sums": a list of numpy arrays for each that holds something, "names": of their
        variables}; None if there is nothing."""
        if self._calls is None:
            return _copied(self._loaded) if self._loaded["calls"] else None
        calls = int(self._calls.numpy()) % self.passes
        filled = [total for total in self._sums.values() if total.filled.numpy()]
        waiting = self._loaded["sums"]
        sums = [*(total.arrays() for total in filled), *waiting]
        names = [*(total.name for total in filled), *self._loaded.get("names", [""] * len(waiting))]
        return {"calls": calls, "sums": sums, "names": names} if calls else None

    def load_state_dict(self, state: dict | None) -> None:
        """The inverse; None: nothing is summed."""
        self._loaded = _copied(state or {"calls": 0, "sums": []})
        if self._calls is None:
            return
        self._calls.assign(self._loaded["calls"])
        self._filled.assign(len(self._loaded["sums"]))
        names = [total.name for total in self._sums.values()]
        self._name_loaded(names, names)
        for total in self._sums.values():
            loaded = self._take_loaded(total.name)
            total.clear() if loaded is None else total.load(loaded)


class _Sum:
    """Variables that hold the sum of one variable's gradients so far."""

    def __init__(self, name: str, variable, *parts: tf.Variable):
        self.name, self.of = name, variable
        self.filled = _variable(False)
        self._parts = parts

    def converted(self, gradient):
        """A gradient of either kind as one of the sum's kind and dtype."""
        raise NotImplementedError

    def _with(self, gradient) -> list[tf.Tensor]:
        """What the parts are with one more gradient, which is converted."""
        raise NotImplementedError

    def add(self, gradient) -> None:
        for part, value in zip(self._parts, self._with(gradient), strict=True):
            part.assign(value)
        self.filled.assign(True)

    def take(self, gradient, scale: float):
        """The sum with a last gradient, or without one if it is None, times the scale. Clears it."""
        raise NotImplementedError

    def _taken(self, gradient) -> list[tf.Tensor]:
        values = [part.read_value() for part in self._parts] if gradient is None else self._with(gradient)
        self.clear()
        return values

    def clear(self) -> None:
        for part in self._parts:
            part.assign(tf.zeros([size or 0 for size in part.shape], part.dtype))
        self.filled.assign(False)

    def arrays(self) -> list:
        return list(map(_in_numpy, self._parts))

    def load(self, gradient) -> None:
        self.clear()
        self.add(self.converted(gradient))


class _Dense(_Sum):
    def __init__(self, name, variable, gradient):
        dtype = variable.dtype if gradient is None else gradient.dtype
        super().__init__(name, variable, _variable(tf.zeros(variable.shape, dtype)))

    def converted(self, gradient):
        if isinstance(gradient, tf.IndexedSlices):
            shape = tf.constant(tuple(self.of.shape))
            gradient = tf.convert_to_tensor(tf.IndexedSlices(gradient.values, gradient.indices, shape))
        return tf.cast(gradient, self._parts[0].dtype)

    def _with(self, gradient):
        return [self._parts[0] + gradient]

    def take(self, gradient, scale):
        (total,) = self._taken(gradient)
        return total * tf.cast(scale, total.dtype)


class _Rows(_Sum):
    def __init__(self, name, variable, gradient):
        shape = variable.shape[1:]
        dtype = variable.dtype if gradient is None else gradient.dtype
        indices = gradient.indices.dtype if isinstance(gradient, tf.IndexedSlices) else tf.int64
        super().__init__(
            name,
            variable,
            _variable(tf.zeros([0, *shape], dtype), shape=tf.TensorShape([None, *shape])),
            _variable(tf.zeros([0], indices), shape=tf.TensorShape([None])),
        )

    def converted(self, gradient):
        values, indices = self._parts
        shape = tf.constant(tuple(self.of.shape))
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.IndexedSlices(gradient, tf.range(self.of.shape[0]), shape)
        return tf.IndexedSlices(
            tf.cast(gradient.values, values.dtype),
            tf.cast(gradient.indices, indices.dtype),
            shape if gradient.dense_shape is None else gradient.dense_shape,
        )

    def _with(self, gradient):
        new = gradient.values, gradient.indices
        return [tf.concat([part, added], 0) for part, added in zip(self._parts, new, strict=True)]

    def take(self, gradient, scale):
        values, indices = self._taken(gradient)
        shape = tf.constant(tuple(self.of.shape)) if gradient is None else gradient.dense_shape
        return tf.IndexedSlices(values * tf.cast(scale, values.dtype), indices, shape)


def _variable(value, **options) -> tf.Variable:
    return ResourceVariable(value, trainable=False, **options)


def _copied(state: dict) -> dict:
    return {key: value if key == "calls" else [*value] for key, value in state.items()}


def _in_numpy(variable):
    """In a type that files of NumPy know; bfloat16 is none."""
    return tf.cast(variable, tf.float32).numpy() if variable.dtype.size < 4 else variable.numpy()

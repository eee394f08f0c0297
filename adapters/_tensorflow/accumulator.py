"""Gradients summed over several calls, in eager code and in graphs: Horovod's backward_passes_per_step."""

import tensorflow as tf


class Accumulator:
    """Sums the gradients of `passes` calls. average: divide the sum by their number. sparse_as_dense: sum IndexedSlices as
    dense tensors, else their rows are kept one after the other."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool):
        self.passes = passes
        self._scale = 1 / passes if average else 1.0
        self._sparse_as_dense = sparse_as_dense
        self._sums: dict[tuple, _Dense | _Rows] = {}
        self._calls: tf.Variable | None = None
        self._loaded: dict = {"calls": 0, "sums": []}  # for variables that are not made yet

    def call(self, gradients, variables, apply, skip) -> None:
        """At every passes-th call apply(sums), a list in the order of the variables; else skip()."""
        if self.passes == 1:
            apply(gradients)
            return
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        pairs = [(g is not None and self._sum(g, v), g) for g, v in zip(gradients, variables, strict=True)]

        def apply_sums():
            apply([own.take(gradient, self._scale) if own else None for own, gradient in pairs])

        def add():
            for own, gradient in pairs:
                if own:
                    own.add(gradient)
            skip()

        if self._calls is None:
            with tf.init_scope():
                self._calls = tf.Variable(self._loaded["calls"], dtype=tf.int64, trainable=False, name="backward_passes")
        calls = self._calls.assign_add(1)
        tf.cond(tf.equal(calls % self.passes, 0), apply_sums, add)

    def _sum(self, gradient, variable) -> "_Dense | _Rows":
        kind = _Rows if isinstance(gradient, tf.IndexedSlices) else _Dense
        key = (id(variable), kind)
        if key not in self._sums:
            with tf.init_scope():
                self._sums[key] = kind(gradient, variable)
                if self._loaded["sums"]:
                    self._sums[key].load(self._loaded["sums"].pop(0))
        return self._sums[key]

    def state_dict(self) -> dict | None:
        """{"calls": since the last sums, "sums": a list of numpy arrays for each, in the order of the variables}; None if
        there is nothing."""
        if self._calls is None:
            return {**self._loaded, "sums": [*self._loaded["sums"]]} if self._loaded["calls"] else None
        calls = int(self._calls.numpy()) % self.passes
        return {"calls": calls, "sums": [own.arrays() for own in self._sums.values()]} if calls else None

    def load_state_dict(self, state: dict | None) -> None:
        """The inverse; None: nothing is summed."""
        self._loaded = {"calls": state["calls"], "sums": [*state["sums"]]} if state else {"calls": 0, "sums": []}
        if self._calls is not None:
            self._calls.assign(self._loaded["calls"])
        for own in self._sums.values():
            own.load(self._loaded["sums"].pop(0)) if self._loaded["sums"] else own.clear()


class _Sum:
    """Variables that hold the sum of one variable's gradients so far."""

    def __init__(self, variable, *parts: tf.Variable):
        self._of = variable  # keeps its id
        self._parts = parts

    def _with(self, gradient) -> list[tf.Tensor]:
        """What the parts are with one more gradient."""
        raise NotImplementedError

    def add(self, gradient) -> None:
        for part, value in zip(self._parts, self._with(gradient), strict=True):
            part.assign(value)

    def clear(self) -> None:
        for part in self._parts:
            part.assign(tf.zeros([size or 0 for size in part.shape], part.dtype))

    def arrays(self) -> list:
        return list(map(_in_numpy, self._parts))

    def load(self, arrays) -> None:
        for part, array in zip(self._parts, arrays, strict=True):
            part.assign(tf.cast(array, part.dtype))


class _Dense(_Sum):
    def __init__(self, gradient, variable):
        super().__init__(variable, tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False))

    def _with(self, gradient):
        return [self._parts[0] + gradient]

    def take(self, gradient, scale: float):
        (total,) = self._with(gradient)
        self.clear()
        return total * tf.cast(scale, total.dtype)


class _Rows(_Sum):
    def __init__(self, gradient, variable):
        shape = variable.shape[1:]
        super().__init__(
            variable,
            tf.Variable(tf.zeros([0, *shape], gradient.dtype), shape=tf.TensorShape([None, *shape]), trainable=False),
            tf.Variable(tf.zeros([0], gradient.indices.dtype), shape=tf.TensorShape([None]), trainable=False),
        )

    def _with(self, gradient):
        new = gradient.values, gradient.indices
        return [tf.concat([part, added], 0) for part, added in zip(self._parts, new, strict=True)]

    def take(self, gradient, scale: float):
        values, indices = self._with(gradient)
        self.clear()
        return tf.IndexedSlices(values * tf.cast(scale, values.dtype), indices, gradient.dense_shape)


def _in_numpy(variable):
    """In a type that files of NumPy know; bfloat16 is none."""
    return tf.cast(variable, tf.float32).numpy() if variable.dtype.size < 4 else variable.numpy()

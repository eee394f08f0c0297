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
        sums = [
            None if gradient is None else self._sum(gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

        def apply_sums():
            totals = [
                None if own is None else own.take(gradient, self._scale)
                for own, gradient in zip(sums, gradients, strict=True)
            ]
            apply(totals)

        def add():
            for own, gradient in zip(sums, gradients, strict=True):
                if own is not None:
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


class _Dense:
    def __init__(self, gradient, variable):
        self._of = variable  # keeps its id
        self._sum = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)

    def add(self, gradient) -> None:
        self._sum.assign_add(gradient)

    def take(self, gradient, scale: float):
        total = (self._sum + gradient) * tf.cast(scale, gradient.dtype)
        self.clear()
        return total

    def clear(self) -> None:
        self._sum.assign(tf.zeros_like(self._sum))

    def arrays(self) -> list:
        return [_in_numpy(self._sum)]

    def load(self, arrays) -> None:
        self._sum.assign(tf.cast(arrays[0], self._sum.dtype))


class _Rows:
    def __init__(self, gradient, variable):
        self._of = variable
        rows = tf.TensorShape([None, *variable.shape[1:]])
        self._values = tf.Variable(tf.zeros([0, *variable.shape[1:]], gradient.dtype), shape=rows, trainable=False)
        self._indices = tf.Variable(tf.zeros([0], gradient.indices.dtype), shape=tf.TensorShape([None]), trainable=False)

    def _joined(self, gradient):
        return (tf.concat([self._values, gradient.values], 0), tf.concat([self._indices, gradient.indices], 0))

    def add(self, gradient) -> None:
        values, indices = self._joined(gradient)
        self._values.assign(values)
        self._indices.assign(indices)

    def take(self, gradient, scale: float):
        values, indices = self._joined(gradient)
        self.clear()
        return tf.IndexedSlices(values * tf.cast(scale, values.dtype), indices, gradient.dense_shape)

    def clear(self) -> None:
        self._values.assign(tf.zeros([0, *self._values.shape[1:]], self._values.dtype))
        self._indices.assign(tf.zeros([0], self._indices.dtype))

    def arrays(self) -> list:
        return [_in_numpy(self._values), self._indices.numpy()]

    def load(self, arrays) -> None:
        self._values.assign(tf.cast(arrays[0], self._values.dtype))
        self._indices.assign(arrays[1])


def _in_numpy(variable):
    """In a type that files of NumPy know; bfloat16 is none."""
    return tf.cast(variable, tf.float32).numpy() if variable.dtype.size < 4 else variable.numpy()

"""What the checks of the TensorFlow adapter share."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext.adapters._tensorflow.reduce import Options, Reducer
from grace_ext.adapters.horovod_tensorflow import DistributedGradientTape

SIZES = [(784, 64), (64,), (64, 48), (48,), (48, 40), (40,)]


def variables(seed=1):
    generator = np.random.default_rng(seed)
    return [
        tf.Variable(generator.standard_normal(shape).astype(np.float32) / 8, name=f"variable{i}")
        for i, shape in enumerate(SIZES)
    ]


def loss_of(weights, x, y):
    for i in range(0, len(weights), 2):
        x = x @ weights[i] + weights[i + 1]
        x = tf.nn.relu(x) if i < len(weights) - 2 else x
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x))


def batches(steps, batch=8, rank=None):
    """Other data on every rank."""
    generator = np.random.default_rng(100 + (hvd.rank() if rank is None else rank))
    for _ in range(steps):
        yield (
            tf.constant(generator.standard_normal((batch, 784)).astype(np.float32)),
            tf.constant(generator.integers(0, 10, batch)),
        )


def train(wrap, steps=5, in_graph=True, lr=0.05):
    """Train with wrap(tape); returns the flat variables and the variables."""
    weights = variables()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, x, y)
        for weight, gradient in zip(weights, wrap(tape).gradient(loss, weights), strict=True):
            weight.assign_sub(lr * gradient)

    step = tf.function(step) if in_graph else step
    for x, y in batches(steps):
        step(x, y)
    return flat(weights), weights


def flat(tensors):
    return np.concatenate([tf.cast(tensor, tf.float64).numpy().ravel() for tensor in tensors])


def same_on_all_ranks(array):
    gathered = hvd.allgather(tf.constant(array)[None]).numpy()
    assert all(row.tobytes() == gathered[0].tobytes() for row in gathered), "ranks hold different bits"


def compressed(spec="topk:0.01/rice/qsgd:7", **options):
    return lambda tape: DistributedGradientTape(tape, compression=spec, **options)


class Plain:
    """A tape averaged by Horovod's own operation: its DistributedGradientTape fails with this TensorFlow."""

    def __init__(self, tape, **options):
        self._tape, self._options = tape, options

    def gradient(self, target, sources):
        return [
            hvd.allreduce(gradient, name=f"plain.{i}", **self._options)
            for i, gradient in enumerate(self._tape.gradient(target, sources))
        ]


def reducer(spec="topk:0.01/rice/qsgd:7", memory="residual", **options):
    return Reducer(Options(spec, memory, **options))


def exchange_of(reducer):
    (layout,) = reducer._layouts.values()
    return layout.exchange


def random(*shapes, dtype="float32", seed=0):
    """Other numbers on every rank."""
    generator = np.random.default_rng([seed, hvd.rank()])
    return [tf.cast(generator.standard_normal(shape), dtype) for shape in shapes]


def of_all_ranks(array, name=None) -> np.ndarray:
    """[ranks, ...]"""
    return hvd.allgather(tf.convert_to_tensor(array)[None], name=name).numpy()

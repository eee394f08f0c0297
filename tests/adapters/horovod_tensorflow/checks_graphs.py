"""What is checked inside the ranks of one job: graphs, their order and their errors."""

import gc
import time
import weakref

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import batches, compressed, exchange_of, flat, loss_of, random, reducer, same_on_all_ranks, variables
from support.checking import check, raises
from support.exchanges import arrays_of

from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters.horovod_tensorflow import compression_stats


@check
def no_deadlock_whatever_the_order_of_gradients():
    """30 variables in 30 buckets; on every rank each gradient comes after another random time, for 100 steps."""
    generator = np.random.default_rng(hvd.rank())
    weights = [tf.Variable(tf.ones((40, 40)), name=f"w{i}") for i in range(30)]
    ours = reducer("topk:0.05/rice/qsgd:7", bucket_bytes=1)

    def late(gradient):
        time.sleep(generator.exponential(0.001))
        return gradient

    @tf.function
    def step(numbers):
        own = [
            tf.numpy_function(late, [number * weight], tf.float32, stateful=False)
            for number, weight in zip(tf.unstack(numbers), weights, strict=True)
        ]
        for gradient, weight in zip(own, weights, strict=True):
            gradient.set_shape(weight.shape)
        for weight, gradient in zip(weights, ours.reduce(own, weights), strict=True):
            weight.assign_sub(0.01 * gradient)

    for _ in range(100):
        step(tf.constant(generator.standard_normal(30).astype(np.float32)))
    assert len(exchange_of(ours).buckets) == 30 and ours.stats()["steps"] == 100
    same_on_all_ranks(flat(weights))


@check
def a_rank_that_traces_again_goes_on_with_the_same_memory():
    weights = variables()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, x, y)
        for weight, gradient in zip(weights, compressed()(tape).gradient(loss, weights), strict=True):
            weight.assign_sub(0.05 * gradient)

    for batch in (8, 8, 5 if hvd.rank() == 0 else 8, 8):
        step(*next(batches(1, batch)))
    assert compression_stats(weights)["steps"] == 4
    same_on_all_ranks(flat(weights))


@check
def several_steps_in_a_graph():
    """Unrolled, in a loop, in a branch: the same as step by step."""
    x = tf.stack([x for x, _ in batches(6)])
    y = tf.stack([y for _, y in batches(6)])

    def run(way):
        weights, ours = variables(), reducer()

        def step(i):
            with tf.GradientTape() as tape:
                loss = loss_of(weights, x[i], y[i])
            for weight, gradient in zip(weights, ours.reduce(tape.gradient(loss, weights), weights), strict=True):
                weight.assign_sub(0.05 * gradient)

        def loop():
            for i in tf.range(6):
                step(i)

        def unrolled():
            for i in range(6):
                step(i)

        def branch():
            for i in tf.range(12):
                if i % 2 == 0:
                    step(i // 2)

        {
            "eager": lambda: unrolled,
            "unrolled": lambda: tf.function(unrolled),
            "loop": lambda: tf.function(loop),
            "branch": lambda: tf.function(branch),
        }[way]()()
        assert ours.stats()["steps"] == 6
        return flat(weights)

    expected = run("eager")
    for way in ("unrolled", "loop", "branch"):
        assert np.allclose(run(way), expected, rtol=0, atol=1e-7), way


@check
def steps_that_do_not_depend_on_each_other_keep_their_order():
    """Nothing but the exchange orders these steps."""
    weight = tf.Variable(tf.zeros((50, 60)), name="w")
    given = tf.stack([random((50, 60), seed=i)[0] for i in range(8)])

    def run(in_loop):
        ours = reducer("topk:0.1/rice/raw")

        @tf.function
        def steps():
            if in_loop:
                return tf.map_fn(lambda g: ours.reduce([g], [weight])[0], given)
            return tf.stack([ours.reduce([g], [weight])[0] for g in tf.unstack(given)])

        return steps().numpy()

    ours = reducer("topk:0.1/rice/raw")
    expected = np.stack([ours.reduce([g], [weight])[0].numpy() for g in tf.unstack(given)])
    assert np.array_equal(run(False), expected)
    assert np.array_equal(run(True), expected)


@check
def graphs_that_nobody_uses_any_more_go_away():
    weight, ours = tf.Variable(tf.zeros((40, 50)), name="w"), reducer()
    graphs = []
    for _ in range(3):
        traced = tf.function(lambda gradient: ours.reduce([gradient], [weight])).get_concrete_function(tf.zeros((40, 50)))
        traced(tf.ones((40, 50)))
        graphs.append(weakref.ref(traced.graph))
        del traced
    gc.collect()
    assert [graph() for graph in graphs].count(None) >= 2, graphs


@check
def results_stay_as_they_are():
    """TensorFlow reads the exchange's own memory: what somebody holds must not be written again."""
    weights, ours = variables(), reducer("dense/raw")
    held = []
    for step in range(6):
        own = random(*(weight.shape for weight in weights), seed=step)
        held.append((flat(received := ours.reduce(own, weights)), received))
    assert all(np.array_equal(numbers, flat(received)) for numbers, received in held)


@check
def an_interrupted_step_is_told_and_given_up():
    weights, ours = variables(), reducer()
    shapes = [weight.shape for weight in weights]
    ours.reduce(random(*shapes), weights)
    exchange = exchange_of(ours)
    before = arrays_of(exchange)
    exchange.start(exchange.buckets[0], lambda out: out.fill(1))
    with raises(ExchangeError, "interrupted"):
        ours.reduce(random(*shapes, seed=1), weights)
    after = arrays_of(exchange)
    assert all(np.array_equal(after[name], state) for name, state in before.items())
    same_on_all_ranks(flat(ours.reduce(random(*shapes, seed=2), weights)))


@check
def xla_is_refused():
    weights, ours = variables(), reducer()
    own = random(*(weight.shape for weight in weights))
    with raises(ConfigError, "jit_compile"):
        tf.function(lambda *g: ours.reduce(list(g), weights), jit_compile=True)(*own)


@check
def shapes_have_to_be_known():
    weight = tf.Variable(tf.zeros((3, 4)), name="w")

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(gradient):
        return reducer().reduce([gradient], [weight])

    with raises(ConfigError, "shape"):
        step(tf.zeros((3, 4)))

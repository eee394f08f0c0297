"""What is checked inside the ranks of one job: gradients of embeddings, which TensorFlow gives as tf.IndexedSlices."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import exchange_of, of_all_ranks, reducer, same_on_all_ranks
from support.checking import check, check_under_every_launcher, raises
from support.exchanges import arrays_of

from grace_ext import ConfigError

ROWS, WIDTH = 5000, 24


def tables():
    return [
        tf.Variable(tf.zeros((ROWS, WIDTH)), name="table"),
        tf.Variable(tf.zeros((WIDTH, 60)), name="weight"),
        tf.Variable(tf.zeros(ROWS), name="biases"),
    ]


def gradients(step=0, count=300, dtype="float32"):
    """Of the two tables, with duplicates and another number of rows on every rank, and of the weight."""
    generator = np.random.default_rng([step, hvd.rank()])
    count += 10 * hvd.rank()
    rows = np.minimum(generator.zipf(1.3, count), ROWS) - 1
    values, weight, biases = (
        tf.cast(generator.standard_normal(shape), dtype) for shape in ((count, WIDTH), (WIDTH, 60), count)
    )
    return [
        tf.IndexedSlices(values, tf.constant(rows, tf.int32), tf.constant([ROWS, WIDTH])),
        weight,
        tf.IndexedSlices(biases, tf.constant(rows, tf.int64)),
    ]


def densified(slices):
    dense = np.zeros((ROWS, *slices.values.shape[1:]), np.float32)
    np.add.at(dense, slices.indices.numpy(), tf.cast(slices.values, tf.float32).numpy())
    return dense


def of_all_ranks_densified(slices):
    return sum(of_all_ranks(densified(slices))) / hvd.size()


@check
def rows_of_lossless_specs_are_exact():
    for spec in ("dense/raw", "nonzero/auto/raw", "dense/deflate", "powersgd:2"):
        ours, weights = reducer(spec, memory="none"), tables()
        in_graph = tf.function(lambda *given, r=ours, w=weights: r.reduce(list(given), w))
        for reduce in (lambda *given, r=ours, w=weights: r.reduce(list(given), w), in_graph):
            own = gradients()
            received = reduce(*own)
            for given, result in ((own[0], received[0]), (own[2], received[2])):
                assert isinstance(result, tf.IndexedSlices) and result.indices.dtype == given.indices.dtype
                rows = result.indices.numpy()
                assert (np.diff(rows) > 0).all() and rows.size < sum(of_all_ranks(given.indices.shape[0]))
                assert np.allclose(densified(result), of_all_ranks_densified(given), rtol=0, atol=1e-6), spec
            assert isinstance(received[1], tf.Tensor)
        assert np.array_equal(received[0].dense_shape, [ROWS, WIDTH]) and received[2].dense_shape is None


@check_under_every_launcher
def rows_are_bit_identical_and_few_bytes_with_the_default():
    ours, weights = reducer(), tables()
    for step in range(5):
        received = ours.reduce(gradients(step), weights)
        same_on_all_ranks(densified(received[0]))
    stats = ours.stats()
    assert stats["steps"] == 5 and stats["compressed"]["ratio"] > 30, stats


@check
def rows_and_their_residual_add_up():
    ours, weights = reducer("topk:0.1/rice/raw"), tables()
    given = summed = np.zeros((ROWS, WIDTH))
    for step in range(6):
        own = gradients(step)
        given = given + of_all_ranks_densified(own[0])
        summed = summed + densified(ours.reduce(own, weights)[0])
    residual = exchange_of(ours).state_dict()["residual"]["table"].reshape(ROWS, WIDTH)
    kept = sum(of_all_ranks(residual)) / hvd.size()
    assert np.abs(kept).max() > 0.1 and np.allclose(summed + kept, given, rtol=0, atol=1e-5)


@check
def a_non_finite_row_reaches_all_ranks():
    ours, weights = reducer(), tables()
    ours.reduce(gradients(), weights)
    before = arrays_of(exchange_of(ours))
    own = gradients(1)
    if hvd.rank() == 0:
        own[0] = tf.IndexedSlices(tf.fill(own[0].values.shape, np.nan), own[0].indices, own[0].dense_shape)
    assert np.isnan(ours.reduce(own, weights)[0].values).all()
    after = arrays_of(exchange_of(ours))
    assert before and all(np.array_equal(after[name], state) for name, state in before.items())
    assert np.isfinite(ours.reduce(gradients(2), weights)[0].values).all()


@check
def rows_in_half_precision_and_no_rows_at_all():
    ours, weights = reducer("dense/raw", memory="none"), tables()
    own = gradients(count=0 if hvd.rank() == 0 else 50, dtype="float16")
    received = ours.reduce(own, weights)
    assert received[0].dtype == tf.float16
    assert np.allclose(densified(received[0]), of_all_ranks_densified(own[0]), atol=2e-3)


@check
def rows_are_made_dense_when_asked_for():
    ours, weights = reducer("dense/raw", sparse_as_dense=True), tables()
    own = gradients()
    received = ours.reduce(own, weights)
    assert isinstance(received[0], tf.Tensor)
    assert np.allclose(received[0], of_all_ranks_densified(own[0]), rtol=0, atol=1e-6)


@check
def an_embedding_in_a_model_learns():
    """A loop under tf.function, whose batches differ in their words."""
    generator = np.random.default_rng(hvd.rank())
    ours, (table, weight, _) = reducer("topk:0.2/rice/qsgd:7"), tables()
    table.assign(tf.random.stateless_normal(table.shape, (1, 2)))
    weight.assign(tf.random.stateless_normal(weight.shape, (3, 4)) / 5)

    @tf.function
    def step(words):
        with tf.GradientTape() as tape:
            scores = tf.gather(table, words) @ weight
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(words % 60, scores))
        own = tape.gradient(loss, [table, weight])
        assert isinstance(own[0], tf.IndexedSlices)
        rows, dense = ours.reduce(own, [table, weight])
        table.scatter_sub(tf.IndexedSlices(20 * rows.values, rows.indices))
        weight.assign_sub(0.5 * dense)
        return loss

    losses = [float(step(tf.constant(generator.integers(0, 200, 64)))) for _ in range(60)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2, losses
    same_on_all_ranks(table.numpy())
    same_on_all_ranks(weight.numpy())


@check
def rows_outside_the_table_are_told():
    ours = reducer("dense/raw")
    with raises(ConfigError, "the table has 5000"):
        ours.reduce([tf.IndexedSlices(tf.ones((1, WIDTH)), tf.constant([ROWS]))], tables()[:1])

"""What is checked inside the ranks of one job: numbers and options."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import (
    Plain,
    batches,
    compressed,
    exchange_of,
    flat,
    loss_of,
    of_all_ranks,
    random,
    reducer,
    same_on_all_ranks,
    train,
    variables,
)
from support.checking import check, check_under_every_launcher, raises, shutdown_is_seen
from support.exchanges import arrays_of
from support.summing_reference import CASES, gradients, in_one_process, on_two_hosts

from grace_ext import ConfigError
from grace_ext.adapters.horovod_tensorflow import DistributedGradientTape, compression_stats

PROCESS_SETS = []  # the even ranks and the odd ones


@check_under_every_launcher
def ranks_are_bit_identical_after_50_steps():
    for in_graph in (True, False):
        weights, sources = train(compressed(seed=int(in_graph)), 50, in_graph)
        same_on_all_ranks(weights)
        assert np.isfinite(weights).all()
        stats = compression_stats(sources)
        assert stats["steps"] == 50, stats  # also eagerly, where every step has a tape of its own
        assert stats["compressed"]["ratio"] > 120, stats


@check
def a_shutdown_is_seen_by_the_watchdog():
    reducer()
    assert shutdown_is_seen(hvd)


@check
def in_a_graph_and_eagerly_the_same_bits():
    assert np.array_equal(train(compressed())[0], train(compressed(), in_graph=False)[0])


@check_under_every_launcher
def dense_raw_is_what_horovod_gives():
    for in_graph in (True, False):
        ours, _ = train(compressed("dense/raw"), in_graph=in_graph)
        assert np.allclose(ours, train(Plain, in_graph=in_graph)[0], rtol=0, atol=1e-6)


@check
def dense_containers_by_allgather_are_what_horovod_gives():
    ours = train(compressed("dense/deflate", memory="none"))[0]
    assert np.allclose(ours, train(Plain)[0], rtol=0, atol=1e-6)


@check
def horovods_compression_arguments_are_understood():
    for theirs in (hvd.Compression.none, hvd.Compression.fp16):
        ours, sources = train(compressed(theirs))
        assert np.allclose(ours, train(lambda tape, c=theirs: Plain(tape, compression=c))[0], rtol=0, atol=2e-3)
        same_on_all_ranks(ours)
    assert compression_stats(sources)["compressed"]["ratio"] == 2


@check
def sum_and_predivide_match_horovod():
    for options, theirs in (({"op": hvd.Sum}, {"op": hvd.Sum}), ({"gradient_predivide_factor": 2.0}, {})):
        ours = train(compressed("dense/raw", **options))[0]
        assert np.allclose(ours, train(lambda tape, o=theirs: Plain(tape, **o))[0], rtol=0, atol=1e-5), options
    with raises(ConfigError, "Adasum"):
        train(compressed(op=hvd.Adasum))
    with raises(ConfigError, "device_dense"):
        train(compressed(device_dense="/gpu:0"))


@check_under_every_launcher
def every_kind_of_collective_works():
    for spec, communicator in (
        ("randomk:0.1/shared/raw", "allreduce"),
        ("dct/topk:0.05:per=chunk/rice/qsgd:7", "allgather"),
        ("topk:0.05/bloom/polyfit", "allgather"),
        ("powersgd:2", "allgather"),
        ("topk:0.02/rice/qsgd:7", "sharded"),
        ("dense/qsgd:4", "tree"),
        ("topk:0.02/rice/qsgd:7", "hierarchical"),
        ("powersgd:2:start=3", "allgather"),
    ):
        with on_two_hosts(hvd.rank()):
            ours, sources = train(compressed(spec, communicator=communicator), steps=6)
        same_on_all_ranks(ours)
        start, _ = train(Plain, steps=0)
        assert np.abs(ours - start).max() > 1e-3, spec
        stats = compression_stats(sources)
        assert stats["compressed"]["ratio"] > (1.2 if "start" in spec else 3), (spec, stats)


@check_under_every_launcher
def sums_on_the_way_are_what_one_process_gives():
    """Bit for bit, with a gradient that is not finite in between."""
    for communicator, spec, memory, d in CASES:
        ours = reducer(spec, memory, communicator=communicator, rules={"*": spec})
        given = gradients(3, hvd.size(), d)
        given[1, hvd.size() - 1, d // 2] = np.nan
        with on_two_hosts(hvd.rank()):
            outs = [ours.reduce([tf.constant(own)], [tf.Variable(own, name="w")])[0] for own in given[:, hvd.rank()]]
        expected, kept = in_one_process(communicator, spec, given, memory)[hvd.rank()]
        assert np.array_equal(outs, expected, equal_nan=True), spec
        assert memory == "none" or np.array_equal(exchange_of(ours).state_dict()["residual"]["w"], kept), spec


@check
def on_one_host_the_sum_is_exact():
    """In float32, also for a spec that goes by allreduce in float16 otherwise."""
    for spec in ("dense/fp16", "topk:0.02/rice/qsgd:7"):
        ours = reducer(spec, communicator="hierarchical", rules={"*": spec})
        own = gradients(1, hvd.size(), 500)[0]
        result = ours.reduce([tf.constant(own[hvd.rank()])], [tf.Variable(own[0], name="w")])[0]
        assert np.abs(result.numpy() - own.mean(axis=0)).max() < 1e-6, spec


@check_under_every_launcher
def residual_plus_sent_is_the_gradient():
    ours = reducer("topk:0.05/rice/raw")
    weights = variables()
    before = {}
    for step in range(3):
        own = random(*(weight.shape for weight in weights), seed=step)
        received = ours.reduce(own, weights)
        state = exchange_of(ours).state_dict()["residual"]
        assert len(state) == 3, "weights are compressed, biases are not"
        for weight, gradient, result in zip(weights, own, received, strict=True):
            name = weight.name.removesuffix(":0")
            if name not in state:
                continue
            compensated = gradient.numpy().ravel() + before.get(name, np.float32(0))
            sent = compensated - state[name]
            assert ((sent == 0) | (state[name] == 0)).all(), "an element is sent whole or kept whole, to the bit"
            summed = np.zeros_like(sent)
            for row in of_all_ranks(sent):
                summed += row * np.float32(1 / hvd.size())
            assert np.array_equal(summed, result.numpy().ravel()), name
        before = state


@check_under_every_launcher
def a_non_finite_gradient_reaches_all_ranks_and_leaves_the_memory_alone():
    for bad in (np.nan, np.inf):
        ours, weights = reducer(), variables()
        shapes = [weight.shape for weight in weights]
        ours.reduce(random(*shapes), weights)
        before = arrays_of(exchange_of(ours))
        own = random(*shapes, seed=1)
        if hvd.rank() == hvd.size() - 1:
            own[2] = tf.tensor_scatter_nd_update(own[2], [[3, 4]], [bad])
        received = ours.reduce(own, weights)
        assert np.isnan(received[2]).any() and not np.isfinite(received[2]).all()
        after = arrays_of(exchange_of(ours))
        assert before and all(np.array_equal(after[name], state) for name, state in before.items())
        received = ours.reduce(random(*shapes, seed=2), weights)
        assert all(np.isfinite(one).all() for one in received)
        same_on_all_ranks(flat(received))


@check
def half_precision_and_double_gradients_keep_their_dtype():
    weights = [tf.Variable(tf.zeros((40, 50), dtype), name=dtype) for dtype in ("float16", "bfloat16", "float64", "float32")]
    own = [random((40, 50), dtype=weight.dtype, seed=i)[0] for i, weight in enumerate(weights)]
    for spec in ("dense/raw", "dense/deflate"):
        received = reducer(spec, memory="none").reduce(own, weights)
        for gradient, result in zip(own, received, strict=True):
            assert result.dtype == gradient.dtype
            expected = of_all_ranks(tf.cast(gradient, tf.float32)).mean(0, dtype=np.float64)
            assert np.allclose(tf.cast(result, tf.float64), expected, rtol=2e-2, atol=1e-2)
    own[0] = tf.fill((40, 50), tf.constant(np.inf if hvd.rank() == 0 else 1, tf.float16))
    assert not np.isfinite(reducer(memory="none").reduce(own, weights)[0]).any()


@check
def gradients_that_are_not_there_stay_away():
    weights = variables()
    own = random(*(weight.shape for weight in weights))
    own[1] = own[4] = None
    received = reducer("dense/raw").reduce(own, weights)
    assert [one is None for one in received] == [one is None for one in own]
    assert np.allclose(received[0], of_all_ranks(own[0]).mean(0), atol=1e-6)
    assert reducer().reduce([None, None], weights[:2]) == [None, None]


@check
def ranks_that_differ_are_told():
    weights = variables()
    own = random(*(weight.shape for weight in weights))
    with raises(ConfigError, "all ranks must wrap the same model"):
        reducer("topk:0.01" if hvd.rank() else "topk:0.02").reduce(own, weights)
    with raises(ConfigError, "all ranks must wrap the same model"):
        reducer().reduce([None, *own[1:]] if hvd.rank() else own, weights)


@check
def gradients_that_are_no_real_numbers_are_refused():
    with raises(ConfigError, "complex64"):
        reducer().reduce([tf.zeros((3, 3), tf.complex64)], [tf.Variable(tf.zeros((3, 3), tf.complex64), name="z")])


@check_under_every_launcher
def process_sets_exchange_among_themselves():
    own = PROCESS_SETS[hvd.rank() % 2]
    weights = variables()
    gradients = random(*(weight.shape for weight in weights))
    if own.size() == 1:
        received = reducer("dense/raw", process_set=own).reduce(gradients, weights)
        assert all(np.array_equal(a, b) for a, b in zip(received, gradients, strict=True))
        return
    received = reducer("dense/deflate", "none", process_set=own).reduce(gradients, weights)
    gathered = hvd.allgather(gradients[0][None], process_set=own).numpy()
    assert np.allclose(received[0], gathered.mean(0), atol=1e-6)
    chooses = reducer(communicator="auto", process_set=own)
    for _ in range(6):  # between two of them it measures the set's links
        chooses.reduce(gradients, weights)


@check_under_every_launcher
def what_some_ranks_do_in_a_process_set_does_not_concern_the_others():
    if PROCESS_SETS[0].included():
        for _ in range(2):
            train(compressed(process_set=PROCESS_SETS[0]), steps=2)
    same_on_all_ranks(train(compressed(), steps=2)[0])


@check
def groups_share_a_bucket():
    weights = variables()
    own = random(*(weight.shape for weight in weights))
    for groups, count in ((None, 2), (2, 4), ([[weights[0], weights[4]]], 3)):
        ours = reducer("topk:0.1", groups=groups)
        received = ours.reduce(own, weights)
        same_on_all_ranks(flat(received))
        assert len(exchange_of(ours).buckets) == count, [bucket.tensors for bucket in exchange_of(ours).buckets]
    with raises(ConfigError, "only appear once"):
        reducer(groups=[[weights[0]], [weights[0]]]).reduce(own, weights)


@check
def tapes_with_equal_options_share_a_memory():
    groups = variables()  # of other variables, to be told apart without a look at their values
    weights = variables()
    for x, y in batches(3):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, x, y)
        tape = DistributedGradientTape(tape, groups=[weights[:2], groups], rules={"none": "dense"})
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
    assert tape.compression_stats()["steps"] == 3


@check
def gradients_of_tensors_may_change_their_shape():
    for size in (40, 60, 40):
        x = tf.constant(random((size, 50))[0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x**2)
        received = DistributedGradientTape(tape, compression="dense/raw").gradient(loss, x)
        assert np.allclose(received, 2 * of_all_ranks(x).mean(0), atol=1e-5)


@check
def the_tape_keeps_the_structure_and_leaves_local_sources_alone():
    weights = variables()
    x, y = next(batches(1))
    sources = {"head": weights[4:], "body": (weights[0], weights[1]), "rest": weights[2:4]}
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(weights, x, y)
    own = tape.gradient(loss, sources)
    for scale in (True, False):
        wrapped = DistributedGradientTape(tape, compression="dense/raw", scale_local_gradients=scale)
        assert isinstance(wrapped, tf.GradientTape)
        wrapped.register_local_source(weights[0])
        received = wrapped.gradient(loss, sources)
        tf.nest.assert_same_structure(own, received)
        assert np.allclose(received["body"][0], own["body"][0] / (hvd.size() if scale else 1))
        assert np.allclose(received["head"][1], of_all_ranks(own["head"][1]).mean(0), atol=1e-6)
    assert np.array_equal(tape.gradient(loss, weights[1]), own["body"][1]), "the given tape stays as it was"
    one = DistributedGradientTape(tape, compression="dense/raw").gradient(loss, weights[1])
    assert np.allclose(one, received["body"][1], atol=1e-6)
    with raises(ConfigError, "not wrapped yet"):
        DistributedGradientTape(wrapped)


@check
def a_tape_can_be_wrapped_while_it_records():
    x = tf.Variable(random((8,))[0])
    for inside in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x**2)
            wrapped = DistributedGradientTape(tape, compression="dense/raw")
            loss = 2 * loss
            if inside:
                received = wrapped.gradient(loss, x)
        received = received if inside else wrapped.gradient(loss, x)
        assert np.allclose(received, 4 * of_all_ranks(x).mean(0), atol=1e-5)


@check
def derivatives_of_what_was_exchanged_are_refused():
    x = tf.Variable(random((8,))[0])

    def second_order():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x**3)
            penalty = tf.reduce_sum(DistributedGradientTape(tape, compression="dense/raw").gradient(loss, x)) + loss
        outer.gradient(penalty, x)

    for run in (second_order, tf.function(second_order)):
        with raises(ConfigError, "derivatives of gradients that a DistributedGradientTape has exchanged"):
            run()
    with tf.GradientTape(persistent=True) as tape:
        squares = x**2
    for method in ("jacobian", "batch_jacobian"):
        with raises(ConfigError, f"{method} of a DistributedGradientTape would exchange row by row"):
            getattr(DistributedGradientTape(tape), method)(squares, x)

"""What is checked inside the ranks of one job: communicator="auto", whose ways are nodes of one graph."""

import functools

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import Plain, compressed, exchange_of, flat, of_all_ranks, random, reducer, same_on_all_ranks, train
from support.auto_control import always, hurried
from support.checking import check, check_under_every_launcher
from support.exchanges import arrays_of
from support.summing_reference import on_two_hosts

from grace_ext.adapters.horovod_tensorflow import compression_stats

SHAPES = [(64, 48), (48,), (48, 40)]


@check
def auto_measures_chooses_and_looks_again():
    for in_graph in (True, False):
        with hurried() as plans:
            weights, sources = train(compressed(communicator="auto", seed=int(in_graph)), 130, in_graph)
        same_on_all_ranks(weights)
        assert np.isfinite(weights).all()
        assert plans.count(plans[0]) > 2, "it did not look again"
        assert {way for plan in plans for way in plan} >= {"allgather", "fp16", "float32"}, plans
        counts = of_all_ranks(tf.constant(len(plans)))
        assert len(set(counts.tolist())) == 1, counts
        assert compression_stats(sources)["ways"], "no tensor chooses"


@check_under_every_launcher
def a_dense_way_gives_what_horovod_gives():
    for way, tolerance, options in (("float32", 5e-6, {}), ("fp16", 3e-3, {"compression": hvd.Compression.fp16})):
        theirs, _ = train(functools.partial(Plain, **options), 4)
        for in_graph in (True, False):
            with always(way):
                ours, sources = train(compressed(communicator="auto"), 4, in_graph)
            assert np.abs(ours - theirs).max() < tolerance, (way, in_graph)
            stats = compression_stats(sources)
            assert set(stats["ways"].values()) == {way}
            assert stats["last_step"]["compressed"]["ratio"] == (2 if way == "fp16" else 1), stats


@check
def every_way_gives_what_it_gives_alone():
    """In one graph, which was built before the first of them."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    alone = {}
    with on_two_hosts(hvd.rank()):
        ways = ["allgather", "sharded", "hierarchical"] if hvd.size() > 2 else ["allgather"]
        for way in ways:
            twin = reducer("topk:0.1/rice/raw", communicator=way)
            alone[way] = [flat(twin.reduce(random(*SHAPES, seed=step), variables)) for step in range(2)]
        with always(ways[0]):
            ours = reducer("topk:0.1/rice/raw", communicator="auto")
            step = tf.function(lambda gradients: ours.reduce(gradients, variables))
            for way in (*ways, *ways[::-1]):
                if ours._layouts:
                    exchange_of(ours).state.load_state_dict({})
                    for bucket in exchange_of(ours).buckets:
                        if bucket.communicator.switches:
                            bucket.communicator.switch_to(way)
                for number in range(2):
                    got = flat(step(random(*SHAPES, seed=number)))
                    assert np.allclose(got, alone[way][number], rtol=0, atol=1e-6), (way, number)


@check
def what_is_owed_is_paid_before_the_first_dense_step_ends():
    """Three compressed steps, three dense ones: the ranks' gradients and what they got have the same sum."""
    variables, given, got = [tf.Variable(tf.zeros(shape)) for shape in SHAPES], 0, 0
    with always("allgather"):
        ours = reducer("topk:0.05/rice/raw", communicator="auto")
        for step in range(6):
            if step == 3:
                for bucket in exchange_of(ours).buckets:
                    if bucket.communicator.switches:
                        bucket.communicator.switch_to("float32")
            gradients = random(*SHAPES, seed=step)
            given, got = given + flat(gradients), got + flat(ours.reduce(gradients, variables))
    assert np.allclose(got, of_all_ranks(given, "given").mean(axis=0), rtol=0, atol=1e-5)
    assert not any(array.any() for name, array in arrays_of(exchange_of(ours)).items() if name.startswith("residual"))


@check
def gradients_of_other_widths_go_through_the_buckets():
    for dtype in ("float16", "float64"):
        variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES]
        with always("float32"):
            ours = reducer(communicator="auto")
            for step in range(3):
                gradients = random(*SHAPES, dtype=dtype, seed=step)
                got = ours.reduce(gradients, variables)
        assert all(gradient.dtype == dtype for gradient in got)
        assert np.allclose(flat(got), of_all_ranks(flat(gradients)).mean(axis=0), rtol=0, atol=2e-3)

"""What is checked inside the ranks of one job: memories and steps where other variables have gradients than before."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from harness import reducer, same_on_all_ranks
from support.checking import check, covering

from grace_ext.adapters.horovod_tensorflow import DistributedOptimizer
from grace_ext.memory import make_memory

NAMES = ("trunk", "a", "b")
SHAPE = (48, 40)


def gradients(step):
    """Other numbers on every rank."""
    generator = np.random.default_rng([step, hvd.rank()])
    return [tf.constant(generator.standard_normal(SHAPE).astype(np.float32)) for _ in NAMES]


#: Which variables have a gradient in a step.
PATTERNS = {
    "all": lambda step: (True, True, True),
    "by turns": lambda step: (True, step % 2 == 0, step % 2 == 1),
    "unfrozen": lambda step: (True, step > 3, step > 3),
    "frozen": lambda step: (True, step < 3, False),
}


def given(step, pattern, changed=None):
    found = gradients(step) if changed is None else changed
    return [one if there else None for one, there in zip(found, PATTERNS[pattern](step), strict=True)]


def runner(do, in_graph):
    """do(gradients), or a graph of it for each set of gradients."""
    return tf.function(lambda *given: do(*given)) if in_graph else do


def saved(state, field, name):
    (layout,) = state["layouts"]
    return layout["memories"][hvd.rank()][field][name]


@check
def what_a_variable_receives_depends_on_no_other_variables_gradient():
    """With a bucket for each. The density depends on the number of the step."""
    memories = ("residual:decay=0.9", "ef21", "dgc", "momentum:0.9", "residual:bits=8")
    for memory, in_graph in covering([(memory, in_graph) for memory in memories for in_graph in (True, False)]):
        results = {}
        for pattern in PATTERNS if in_graph else ("all", "by turns"):
            of = [tf.Variable(tf.zeros(SHAPE), name=name) for name in NAMES]
            schedule = {"density": lambda step: 0.3 / (1 + step)}
            ours = reducer("topk:0.1/rice/qsgd:7", memory, groups=[[one] for one in of], schedule=schedule)
            reduce = runner(lambda given, ours=ours, of=of: ours.reduce(given, of), in_graph)
            results[pattern] = [reduce(given(step, pattern))[0].numpy() for step in range(7)]
            assert ours.state_dict()["layouts"][0]["step"] == 7
        same_on_all_ranks(np.stack(results["by turns"]))
        for pattern, received in results.items():
            for step, (one, other) in enumerate(zip(received, results["all"], strict=True)):
                assert np.array_equal(one, other), (memory, in_graph, pattern, step)


@check
def residuals_wait_for_their_variables():
    """In one bucket with the others, and in a Memory that the user has made."""
    of = [tf.Variable(tf.zeros(SHAPE), name=name) for name in NAMES]
    for memory in ("residual", make_memory("residual")):
        ours = reducer("topk:0.1/rice/raw", memory, groups=1)
        total, wanted = np.zeros((2, *SHAPE)), np.zeros((2, *SHAPE))
        for step in range(60):
            mine = [one * (step < 6) for one in gradients(step)]
            before = ours.state_dict() if step else None
            received = ours.reduce(given(step, "by turns", mine), of)
            idle = 1 if step % 2 else 2
            if step > 1:
                kept = [saved(state, "residual", NAMES[idle]) for state in (before, ours.state_dict())]
                assert np.array_equal(*kept) and (step > 6 or kept[0].any()), step
            for place, index in enumerate((0, 3 - idle)):
                mean = hvd.allreduce(mine[index], op=hvd.Average, name=f"mean.{place}").numpy()
                if index == 0:
                    wanted[0] += mean
                    total[0] += received[0]
                else:
                    wanted[1] += mean
                    total[1] += received[index]
        assert np.allclose(total, wanted, rtol=0, atol=1e-4), memory


def adam(memory, groups):
    of = [keras.Variable(np.zeros(SHAPE, np.float32), name=name) for name in NAMES]
    spec = "dense/onebit" if memory.startswith("onebit") else "topk:0.1/rice/qsgd:7"
    groups = [[one] for one in of] if groups else None
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.01), compression=spec, memory=memory, groups=groups)
    optimizer.build(of)
    return optimizer, of


@check
def moments_in_a_memory_follow_their_variables():
    for memory, in_graph in covering([(memory, one) for memory in ("adam", "onebit_adam:3") for one in (True, False)]):
        results = {}
        for pattern in PATTERNS:
            optimizer, of = adam(memory, groups=True)
            step_with = runner(lambda given, apply=optimizer.apply, of=of: apply(given, of), in_graph)
            trunk = []
            for step in range(8):
                before = np.stack(of)
                step_with(given(step, pattern))
                moved = np.abs(np.stack(of) - before).max((1, 2))
                assert ((moved > 0) == PATTERNS[pattern](step)).all(), (memory, in_graph, pattern, step, moved)
                trunk.append(np.asarray(of[0]))
            results[pattern] = np.stack(trunk)
            same_on_all_ranks(np.stack(of))
        assert all(np.array_equal(one, results["all"]) for one in results.values()), (memory, in_graph)


@check
def two_updates_in_one_graph_follow_each_other():
    """As they do in eager code; the second one needs nothing of the first."""
    results = []
    for in_graph in (False, True):
        optimizer, (trunk, a, b) = adam("adam", groups=False)

        def update(one, other, optimizer=optimizer, trunk=trunk, a=a, b=b):
            optimizer.apply(one, [trunk, a])
            optimizer.apply(other, [trunk, b])

        update = runner(update, in_graph)
        for step in range(4):
            one = gradients(step)
            update(one[:2], [one[2], one[0]])
        results.append(np.stack([trunk, a, b]))
        assert optimizer.compression_state()["layouts"][0]["step"] == 8
    assert np.array_equal(*results)
    same_on_all_ranks(results[0])


@check
def a_state_is_saved_and_loaded_by_variable():
    """Whichever gradients there are before and after it."""
    results = []
    for stop in (None, 3, 4):
        optimizer, of = adam("adam", groups=False)
        for step in range(8):
            if step == stop:
                state, values = optimizer.compression_state(), [np.asarray(one) for one in of]
                optimizer, of = adam("adam", groups=False)
                for one, value in zip(of, values, strict=True):
                    one.assign(value)
                optimizer.load_compression_state(state)
                assert len(optimizer.compression_state()["layouts"]) == 1
            optimizer.apply(given(step, "by turns"), of)
        results.append(np.stack(of))
        assert optimizer.compression_state()["layouts"][0]["step"] == 8
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])

"""What is checked inside the ranks of one job: memories, schedules and their saved states under tapes."""

import functools
import logging
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import compressed, exchange_of, flat, random, reducer, same_on_all_ranks, train, variables
from support.checking import check, check_under_every_launcher, raises
from support.exchanges import arrays_of

from grace_ext import ConfigError
from grace_ext.adapters._tensorflow import saved_state
from grace_ext.adapters.horovod_tensorflow import (
    DistributedGradientTape,
    compression_state,
    compression_stats,
    load_compression_state,
)
from grace_ext.policy.allocation import DENSITIES

SHAPES = {"kernel": (60, 50), "bias": (50,), "embedding": (40, 30)}


def weights():
    return [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]


def gradients(step, rank):
    generator = np.random.default_rng([step, rank])
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def own(step):
    return [tf.constant(gradient) for gradient in gradients(step, hvd.rank()).values()]


def reduce_in(ours, of, in_graph):
    """ours.reduce of gradients, eagerly or in a graph."""
    if not in_graph:
        return lambda given: ours.reduce(given, of)
    return tf.function(lambda given: ours.reduce(given, of))


def largest(vector, density=0.05):
    """Where the top-k elements are."""
    chosen = np.zeros(vector.size, bool)
    chosen[np.argsort(-np.abs(vector), kind="stable")[: round(density * vector.size)]] = True
    return chosen


def momentum_corrected(steps, momentum=0.9):
    """Deep gradient compression by the formulas of the paper: the mean of what all ranks send, step by step."""
    velocity, residual = {}, {}
    for step in range(steps):
        mean = {}
        for rank in range(hvd.size()):
            for name, gradient in gradients(step, rank).items():
                key = name, rank
                velocity[key] = momentum * velocity.get(key, 0) + gradient.ravel().astype(np.float64)
                if name == "bias":  # sent exactly
                    mean[name] = mean.get(name, 0) + velocity[key] / hvd.size()
                    continue
                residual[key] = residual.get(key, 0) + velocity[key]
                sent = largest(residual[key])
                mean[name] = mean.get(name, 0) + np.where(sent, residual[key], 0) / hvd.size()
                residual[key][sent] = velocity[key][sent] = 0
        yield mean


def estimated(steps):
    """EF21 by the formulas of the paper: the mean of all ranks' estimates, step by step."""
    estimates = {}
    for step in range(steps):
        mean = {}
        for rank in range(hvd.size()):
            for name, gradient in gradients(step, rank).items():
                estimate = estimates.setdefault((name, rank), np.zeros(gradient.size))
                sent = largest(gradient.ravel() - estimate) if name != "bias" else slice(None)
                estimate[sent] = gradient.ravel()[sent]
                mean[name] = mean.get(name, 0) + estimate / hvd.size()
        yield mean


@check
def dgc_and_ef21_are_what_the_papers_say():
    for memory, reference in (("dgc", momentum_corrected), ("ef21", estimated)):
        for in_graph in (True, False):
            of = weights()
            # A bucket for each, since the reference sends the largest of each tensor.
            reduce = reduce_in(reducer("topk:0.05/rice/raw", memory, bucket_bytes=1), of, in_graph)
            for step, expected in enumerate(reference(5)):
                for name, result in zip(SHAPES, reduce(own(step)), strict=True):
                    error = np.abs(result.numpy().ravel() - expected[name]).max()
                    assert error < 1e-5, (memory, in_graph, step, name, error)


@check
def memories_by_name_and_with_decay():
    of = weights()
    ours = reducer("topk:0.05/rice/raw", {"*embedding*": "none", "*": "residual:decay=0.5"})
    plainly = reducer("topk:0.05/rice/raw", {"*embedding*": "none"})
    before = None
    for step in range(3):
        ours.reduce(own(step), of)
        plainly.reduce(own(0), of)
        (state,) = (state for field, state in exchange_of(ours).state_dict().items() if field != "step")
        assert list(state) == ["kernel"], list(state)
        if before is not None:
            compensated = gradients(step, hvd.rank())["kernel"].ravel() + before
            kept = state["kernel"] != 0
            assert 0.9 < kept.mean() < 1 and np.array_equal(state["kernel"][kept], 0.5 * compensated[kept])
        before = state["kernel"]
    assert list(exchange_of(plainly).state_dict()["residual"]) == ["kernel"]


@check
def rows_and_dense_tensors_have_memories_of_their_own():
    of = weights()
    rows = tf.IndexedSlices(tf.ones((2, 30)), tf.constant([3, hvd.rank() + 5]))
    with raises(ConfigError, "comes as rows"):
        reducer("topk:0.05/rice/raw", "dgc").reduce([*own(0)[:2], rows], of)
    ours = reducer("topk:0.05/rice/raw", {"embedding": "residual", "*": "dgc"}, rules={"*": "topk:0.05/rice/raw"})
    received = ours.reduce([*own(0)[:2], rows], of)
    same_on_all_ranks(flat(received[:2]))
    state = exchange_of(ours).state_dict()
    assert {*state["residual"]} == {*SHAPES} and {*state["velocity"]} == {"kernel", "bias"}, state.keys()


@check
def a_non_finite_gradient_leaves_every_kind_of_memory_alone():
    for memory in ("dgc", "dgc:clip=1:nesterov=true", "ef21", "ef21:momentum=0.5"):
        of = weights()
        ours = reducer("topk:0.05/rice/raw", memory)
        reduce = reduce_in(ours, of, in_graph=True)
        reduce(own(0))
        before = arrays_of(exchange_of(ours))
        bad = own(1)
        if hvd.rank() == hvd.size() - 1:
            bad[0] = tf.tensor_scatter_nd_update(bad[0], [[3, 4]], [np.inf])
        assert np.isnan(reduce(bad)[0]).any(), memory
        after = arrays_of(exchange_of(ours))
        assert before.keys() == after.keys() and len(before) > 2, (memory, list(before))
        assert all(np.array_equal(before[name], after[name]) for name in before), memory
        received = reduce(own(2))
        assert all(np.isfinite(one).all() for one in received)
        same_on_all_ranks(flat(received))


@check
def a_schedule_is_as_if_each_step_had_its_own_spec():
    densities = [0.25, 0.1, 0.04]
    for schedule in (lambda step: densities[min(step, 2)], "warmup:steps=2:start=0.25:stages=2"):
        of = weights()
        ours = reducer("topk:0.04/rice/raw", "none", schedule={"density": schedule})
        reduce = reduce_in(ours, of, in_graph=True)
        for step, density in enumerate(densities):
            expected = reducer(f"topk:{density}/rice/raw", "none").reduce(own(step), of)
            assert np.array_equal(flat(reduce(own(step))), flat(expected)), (schedule, step)
    with raises(ConfigError, "no part of the specs has a number 'bits'"):
        reducer("topk:0.04/rice/raw", schedule={"bits": "warmup"}).reduce(own(0), weights())
    with raises(ConfigError, "than rank 0"):
        different = 0.1 + 0.1 * hvd.rank()
        reducer(schedule={"density": lambda step: different}).reduce(own(0), weights())


@check
def kimad_sends_what_there_is_time_for():
    """Next to nothing if a step's time is over before it begins, everything if it may take a minute."""
    for schedule in ("kimad", "kimad+"):
        for seconds, density in ((1e-6, DENSITIES[0]), (3600, 1.0)):
            of = weights()
            ours = reducer("topk:0.04/rice/raw", schedule={"density": f"{schedule}:{seconds}"})
            reduce = reduce_in(ours, of, in_graph=True)
            for step in range(4):
                same_on_all_ranks(flat(reduce(own(step))))
            stats = exchange_of(ours).stats()
            assert stats["bandwidth"] > 0 and set(stats["densities"].values()) == {density}, (schedule, stats)


@check
def guarded_lowers_the_density_while_little_waits():
    of = weights()
    ours = reducer("topk:0.04/rice/raw", schedule={"density": "guarded:2"})
    reduce = reduce_in(ours, of, in_graph=True)
    for step in range(34):
        same_on_all_ranks(flat(reduce(own(step))))
    stats = exchange_of(ours).stats()
    (density,) = set(stats["densities"].values())
    assert stats["lag"] >= 0 and 0.001 <= density < 0.2, (stats["lag"], density)


@check
def a_function_made_anew_at_every_step_is_the_same_schedule():
    high = 0.2

    class Plan:
        def levels(self, step):
            return 7 + step

    plan = Plan()
    _, sources = train(
        lambda tape: DistributedGradientTape(
            tape, schedule={"density": lambda step: high / (1 + step), "levels": plan.levels}
        ),
        steps=4,
        in_graph=False,
    )
    assert compression_stats(sources)["steps"] == 4


def interrupted(memory, in_graph, through_file):
    """Six steps, and two with four that follow in new objects. Specs that depend on the step's number, too."""
    results = []
    options = {"memory": memory, "schedule": {"density": lambda step: 0.3 / (1 + step)}}
    for stop in (None, 2):
        of = weights()

        def step(of, given):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(weight * gradient) for weight, gradient in zip(of, given, strict=True)])
            return compressed("topk:0.05/rice/qsgd:7", **options)(tape).gradient(loss, of)

        run = tf.function(functools.partial(step, of)) if in_graph else functools.partial(step, of)
        for number in range(6):
            if number == stop:
                state = compression_state(of)
                if through_file:
                    with tempfile.TemporaryDirectory() as folder:
                        saved_state.write(f"{folder}/a/b.npz", state)
                        state = saved_state.read(f"{folder}/a/b.npz")
                of = weights()
                run = tf.function(functools.partial(step, of)) if in_graph else functools.partial(step, of)
                load_compression_state(of, state)
            received = run(own(number))
        same_on_all_ranks(flat(received))
        results.append((flat(received), compression_state(of)["layouts"][0]["memories"][hvd.rank()]))
    return results


@check_under_every_launcher
def a_saved_state_goes_on_bit_by_bit():
    for memory in ("residual:decay=0.9", "ef21", {"embedding": "dgc:clip=2", "*": "residual"}):
        for in_graph in (True, False) if memory == "ef21" else (True,):
            (plain, memories), (resumed, again) = interrupted(memory, in_graph, through_file=in_graph)
            assert np.array_equal(plain, resumed), (memory, in_graph)
            assert memories.keys() == again.keys() and memories
            for field, kept in memories.items():
                assert all(np.array_equal(array, again[field][name]) for name, array in kept.items()), (memory, field)


@check
def a_state_can_be_loaded_in_the_middle_of_training():
    of, ours = weights(), reducer("topk:0.05/rice/qsgd:7", "ef21")
    for step in range(2):
        ours.reduce(own(step), of)
    state = ours.state_dict()
    first = flat(ours.reduce(own(2), of))
    assert not np.array_equal(first, flat(ours.reduce(own(2), of)))
    ours.load_state_dict(state)
    assert np.array_equal(first, flat(ours.reduce(own(2), of)))


@check
def automatic_names_may_count_on():
    of, ours = weights(), reducer("topk:0.05/rice/raw")
    for step in range(2):
        ours.reduce(own(step), of)
    renamed = [tf.Variable(weight, name=f"{weight.name.removesuffix(':0')}_1") for weight in of]
    again = reducer("topk:0.05/rice/raw")
    again.load_state_dict(ours.state_dict())
    waiting = again.state_dict()
    third = reducer("topk:0.05/rice/raw")
    third.load_state_dict(waiting)
    expected = flat(ours.reduce(own(2), of))
    assert np.array_equal(expected, flat(again.reduce(own(2), renamed)))
    assert np.array_equal(expected, flat(third.reduce(own(2), renamed)))


def said(do) -> list[str]:
    """What the log says meanwhile."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log, level = logging.getLogger("grace_ext"), logging.getLogger("grace_ext").level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        do()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return messages


def trained(memory, steps=2):
    of, ours = weights(), reducer("topk:0.05/rice/raw", memory)
    for step in range(steps):
        ours.reduce(own(step), of)
    return of, ours


def as_of_ranks(state, ranks):
    """States like this one of other ranks, with other numbers in them."""
    states = []
    for rank in range(ranks):
        (layout,), (memory,) = state["layouts"], state["layouts"][0]["memories"].values()
        generator = np.random.default_rng(rank)
        memory = {
            field: {name: generator.standard_normal(array.size).astype(np.float32) for name, array in kept.items()}
            for field, kept in memory.items()
        }
        states.append({"rank": rank, "ranks": ranks, "layouts": [{**layout, "ranks": ranks, "memories": {rank: memory}}]})
    return states


@check
def other_numbers_of_ranks_keep_the_sum_of_residuals():
    for memory, field in (("residual", "residual"), ("dgc", "residual"), ("ef21", "estimate")):
        of, ours = trained(memory)
        states = as_of_ranks(ours.state_dict(), hvd.size() + 1)
        words = said(lambda ours=ours, states=states: ours.load_state_dict(states))
        assert (words == []) == (hvd.rank() > 0) and all("redistributed" in line for line in words), words
        expected = sum(
            state["layouts"][0]["memories"][rank][field]["kernel"].astype(np.float64) for rank, state in enumerate(states)
        )
        now = exchange_of(ours).state_dict()
        kept = hvd.allreduce(tf.constant(now[field]["kernel"], tf.float64), op=hvd.Sum).numpy()
        scale = hvd.size() / len(states) if memory == "ef21" else 1  # of an estimate each rank gets the mean
        assert np.allclose(kept, scale * expected, rtol=0, atol=1e-5), memory
        assert now["step"] == 2
        same_on_all_ranks(flat(ours.reduce(own(2), of)))

        words = said(lambda ours=ours, states=states: ours.load_state_dict(states, "reset"))
        assert hvd.rank() or "start from zero" in words[0], words
        assert not any(array.any() for array in arrays_of(exchange_of(ours)).values())
        with raises(ConfigError, "needs the memories of all"):
            ours.load_state_dict(states[:1], "redistribute")
        with raises(ConfigError, "on_resize='share'"):
            ours.load_state_dict(states, "share")


@check
def states_that_only_some_ranks_have():
    for memory in ("residual", "ef21"):
        of, ours = trained(memory)
        state = ours.state_dict()
        again = reducer("topk:0.05/rice/raw", memory)
        words = said(
            lambda again=again, state=state, of=of: (
                again.load_state_dict(state if hvd.rank() == 0 else None),
                again.reduce(own(2), of),
            )
        )
        assert hvd.rank() or ("all start" if memory == "ef21" else "the others start") in words[-1], (memory, words)
        assert exchange_of(again).step == 3
        again.load_state_dict(state if hvd.rank() == 0 else None)
        kept = any(array.any() for array in arrays_of(exchange_of(again)).values())
        assert kept == (memory == "residual" and hvd.rank() == 0), memory
        same_on_all_ranks(flat(again.reduce(own(3), of)))
    state["layouts"][0]["step"] += hvd.rank()
    with raises(ConfigError, "different steps"):
        again.load_state_dict(state)
    state["layouts"][0]["version"] = 99
    state["layouts"][0]["step"] = 1
    with raises(ConfigError, "version 99"):
        again.load_state_dict(state)


@check
def each_layout_gets_its_own_state():
    of = variables()
    shapes = [weight.shape for weight in of]

    def run(ours, steps):
        results = []
        for step in steps:
            given = random(*shapes, seed=step)
            if step % 2:
                given[0] = None
            results += [one for one in ours.reduce(given, of) if one is not None]
        return flat(results)

    whole, ours, again = (reducer("topk:0.02/rice/qsgd:7") for _ in range(3))
    run(whole, range(4))
    run(ours, range(4))
    again.load_state_dict(ours.state_dict())
    assert np.array_equal(run(whole, [4, 5, 6]), run(again, [4, 5, 6]))
    stats = whole.stats()
    assert stats["steps"] == 7

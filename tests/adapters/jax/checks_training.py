"""What is checked inside the ranks of one job: what an exchange of gradients gives, and trainings with it."""

import itertools
import json
import math
import sys
import warnings
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import WORLD, batches, bits, exchanged, flat, gradients, loss_of, model, same_on_all_ranks, step_with, train
from mpi4py import MPI
from support.auto_control import always
from support.checking import check, check_under_every_launcher, covering

from grace_ext.adapters.jax import exchange_gradients
from grace_ext.policy import auto_tuner
from grace_ext.policy.allocation import DENSITIES

DENSE = "dense/raw"


def dense_mean(step=0, dtype=np.float32):
    return np.mean([flat(gradients(step, rank, dtype)) for rank in range(WORLD.size)], axis=0)


@check_under_every_launcher
def dense_raw_is_the_mean():
    for dtype, error in (("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 8e-3)):
        for compiled in (False, True):
            for step, result in enumerate(exchanged(2, compiled, dtype, compression=DENSE)):
                assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(result))
                assert jax.tree.structure(result) == jax.tree.structure(gradients())
                assert np.abs(flat(result) - dense_mean(step, dtype)).max() < 4 * error
                same_on_all_ranks(result)


@check_under_every_launcher
def inside_and_outside_of_jit_are_the_same_bits():
    options = (
        {},
        {"communicator": "sharded"},
        {"compression": "topk:0.05/rice/raw", "memory": "ef21", "rules": {"*.b": "dense/fp16"}},
        {"compression": "dense/fp16", "communicator": "allreduce"},
        {"compression": "powersgd:2"},
        {"schedule": {"density": "warmup:steps=3"}, "bucket_bytes": 4000},
    )
    for one in options:
        inside, outside = exchanged(compiled=True, **one), exchanged(**one)
        assert bits(inside) == bits(outside), one
        same_on_all_ranks(inside)


@check_under_every_launcher
def ranks_stay_alike_in_a_training():
    """With the default; compiled step by step, with donated arguments, and as one loop."""
    (params, _), losses = train(exchange_gradients(), 50, compiled=True)
    same_on_all_ranks(params)
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5]), losses

    optimizer = optax.chain(exchange_gradients(), optax.sgd(0.1, momentum=0.9))
    step = step_with(optimizer)

    def run(params, state, data):
        def body(carry, batch):
            params, state, _ = step(*carry, batch)
            return (params, state), None

        return jax.lax.scan(body, (params, state), data)[0]

    data = jax.tree.map(lambda *parts: jnp.stack(parts), *batches(50))
    looped, _ = jax.jit(run, donate_argnums=(0, 1))(model(), optimizer.init(model()), data)
    same_on_all_ranks(looped)
    # XLA may round differently in a loop than in a step.
    assert np.abs(flat(looped) - flat(params)).max() < 0.2


@check
def a_dense_exchange_trains_as_one_process_with_all_data():
    (params, _), _ = train(exchange_gradients(DENSE), 10)
    alone, optimizer = model(), optax.sgd(0.1, momentum=0.9)
    state = optimizer.init(alone)
    for everybody in zip(*(batches(10, rank=rank) for rank in range(WORLD.size)), strict=True):
        means = jax.tree.map(lambda *parts: sum(parts) / WORLD.size, *(jax.grad(loss_of)(alone, one) for one in everybody))
        updates, state = optimizer.update(means, state)
        alone = optax.apply_updates(alone, updates)
    assert np.abs(flat(params) - flat(alone)).max() < 1e-5


@check
def memories_and_communicators():
    memories = ("none", "residual", "residual:bits=8", "ef21", "dgc", "momentum")
    communicators = ("allgather", "sharded", "tree", "hierarchical")
    specs = ("topk:0.05/rice/qsgd:7", "randomk:0.1/raw/fp16")
    refused = []
    for memory, communicator, spec in covering(itertools.product(memories, communicators, specs)):
        try:
            results = exchanged(memory=memory, communicator=communicator, compression=spec, bucket_bytes=8000)
        except ValueError as error:
            refused.append((memory, communicator, str(error)))
            continue
        same_on_all_ranks(results)
        assert all(np.isfinite(flat(result)).all() for result in results)
    assert all(memory in ("ef21", "dgc", "momentum") and communicator != "allgather" for memory, communicator, _ in refused)


@check
def auto_chooses_alike_on_all_ranks():
    for way, error in (("float32", 1e-6), ("fp16", 4e-3)):
        with always(way):
            (result,) = exchanged(1, communicator="auto", compression="topk:0.01/rice/qsgd:7")
        assert np.abs(flat(result) - dense_mean()).max() < error
    tuner, chosen = auto_tuner.AutoTuner, []
    choose = tuner._choose
    # However slow the machine becomes, the choice is not made anew.
    with (
        mock.patch.multiple(auto_tuner, _SECONDS=0.01, _ROUNDS=1, _SLOWER=math.inf),
        mock.patch.object(tuner, "_choose", lambda self, tried: (choose(self, tried), chosen.append(self.plan))),
    ):
        exchange = exchange_gradients("topk:0.01/rice/qsgd:7", communicator="auto")
        (params, _), _ = train(exchange, 130, compiled=True)
    same_on_all_ranks(params)
    assert chosen and set(exchange.compression_stats()["ways"].values()) == set(chosen[-1])


@check
def densities_follow_what_is_measured():
    """Kimad: next to nothing if a step's time is over before it begins, everything if it may take an hour. Guarded: less while
    little waits."""
    for schedule, density in (("kimad:1e-06", DENSITIES[0]), ("kimad+:3600", 1.0)):
        exchange = exchange_gradients("topk:0.04/rice/raw", schedule={"density": schedule})
        (params, _), _ = train(exchange, 5)
        same_on_all_ranks(params)
        assert set(exchange.compression_stats()["densities"].values()) == {density}, schedule
    exchange = exchange_gradients("topk:0.04/rice/raw", schedule={"density": "guarded:2"})
    (params, _), _ = train(exchange, 34)
    same_on_all_ranks(params)
    stats = exchange.compression_stats()
    (density,) = set(stats["densities"].values())
    assert stats["lag"] >= 0 and 0.001 <= density < 0.2, (stats["lag"], density)


@check
def optimizers_of_optax_follow():
    """What sums several steps or leaves one out, too."""
    after = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b1=0.0)), 5)
    (params, _), _ = train(exchange_gradients(memory="momentum"), 4, compiled=True, after=after)
    same_on_all_ranks(params)
    several = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=3).gradient_transformation()
    (params, _), _ = train(exchange_gradients(memory={"*.kernel": "residual", "*": "none"}), 6, after=several)
    same_on_all_ranks(params)
    masked = optax.masked(exchange_gradients(), {"first": True, "second": False})
    result, _ = masked.update(model(WORLD.rank), masked.init(model()))
    same_on_all_ranks(result["first"])
    assert bits(result["second"]) == bits(model(WORLD.rank)["second"])


@check
def two_models_in_one_step():
    one, other = exchange_gradients(), exchange_gradients(seed=3)

    @jax.jit
    def step(first, second, states):
        results = other.update(second, states[1]), one.update(first, states[0])
        return [result for result, _ in results], [state for _, state in results[::-1]]

    states = [one.init(None), other.init(None)]
    for number in range(3):
        results, states = step(gradients(number), gradients(number + 9), states)
        same_on_all_ranks(results)


@check
def a_gradient_that_is_not_finite_reaches_all_ranks_and_no_memory():
    exchange = exchange_gradients("topk:0.05/rice/raw")
    update, state = jax.jit(exchange.update), exchange.init(None)
    _, state = update(gradients(), state)
    before = exchange.state_dict()
    broken = gradients(1)
    if WORLD.rank == 1:
        broken["layers"][0]["w"] = broken["layers"][0]["w"].at[3, 4].set(jnp.nan)
    result, state = update(broken, state)
    assert not np.isfinite(flat(result)).all()
    after = exchange.state_dict()
    assert after["step"] == 2
    kept = [state["memories"][WORLD.rank]["residual"] for state in (before, after)]
    assert bits(kept[0]) == bits(kept[1]) and np.abs(flat(kept[0])).max() > 0
    result, _ = update(gradients(2), state)
    assert np.isfinite(flat(same_on_all_ranks(result))).all()


@check
def names_are_paths_and_observers_see_them():
    path = Path(sys.argv[1], "observed.jsonl")
    exchange = exchange_gradients("topk:0.05/rice/raw", observe=str(path), rules={"layers.1.*": "dense/fp16"})
    state = exchange.init(None)
    for step in range(11):
        _, state = exchange.update(gradients(step), state)
    assert [*exchange.state_dict()["order"]] == ["layers.0.w", "layers.1.b", "layers.1.w", "scale"]
    buckets = exchange._exchange.exchange.buckets
    specs = {tensor.name: str(bucket.declared).partition("/")[0] for bucket in buckets for tensor in bucket.tensors}
    assert specs["layers.1.w"] == "dense" and specs["layers.0.w"].startswith("topk")
    assert exchange.compression_stats()["ratio"] > 1
    if WORLD.rank == 0:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert [record["step"] for record in records] == [0, 10] and all(record["bytes_out"] > 0 for record in records)
    # Paths that are the same in short have their full names.
    twice = {"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(4)}
    exchange = exchange_gradients()
    exchange.update(twice, exchange.init(None))
    assert [*exchange.state_dict()["order"]] == ["['a']['b']", "['a.b']"]


@check
def there_may_be_nothing_to_exchange():
    exchange = exchange_gradients(comm=MPI.COMM_SELF)
    given = gradients()
    result, state = jax.jit(exchange.update)(given, exchange.init(given))
    assert bits(result) == bits(given) and state.step == 1
    assert exchange.compression_stats() == {"steps": 0} and exchange.state_dict()["step"] == 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exchange_gradients(comm=MPI.COMM_SELF, observe=str(Path(sys.argv[1], "alone.jsonl")))
    assert len(seen) == 1 and "checks_training" in seen[0].filename
    without = {"nothing": jnp.zeros((0, 3)), "large": jnp.ones((50, 50))}
    for compiled in (False, True):
        several = exchange_gradients()
        update = jax.jit(several.update) if compiled else several.update
        result, _ = update(without, several.init(without))
        assert result["nothing"].shape == (0, 3) and result["large"].shape == (50, 50)
    empty = {}
    assert exchange_gradients().update(empty, exchange.init(None))[0] == {}

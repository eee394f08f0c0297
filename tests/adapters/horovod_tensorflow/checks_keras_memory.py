"""What is checked inside the ranks of one job: memories, schedules and resumption with Keras optimizers."""

import itertools
import logging
import os
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from checks_keras import BATCH, MODES, SGD, X, Y, _skip_a_step, alone, compiled, fit, flat, model, part, scaled, state
from harness import exchange_of, of_all_ranks, same_on_all_ranks
from support.auto_control import always
from support.checking import check, covering, raises
from support.exchanges import arrays_of

from grace_ext import ConfigError
from grace_ext.adapters._tensorflow import saved_state
from grace_ext.adapters.horovod_tensorflow import (
    BroadcastGlobalVariablesCallback,
    CompressionStateCallback,
    DistributedGradientTape,
    DistributedOptimizer,
)

RULES = {"*kernel": "topk:0.1/rice/qsgd:7"}


def memory_of(optimizer):
    return arrays_of(exchange_of(optimizer._grace.reducer))


@check
def exact_dgc_is_the_momentum_of_one_process():
    for kind, mode in covering(itertools.product(SGD, MODES)):
        api, sgd = SGD[kind]
        expected = alone(api, sgd(0.1, momentum=0.9), epochs=2)
        net = compiled(api, DistributedOptimizer(sgd(0.1), compression="dense/raw", memory="dgc"), **MODES[mode])
        fit(net, epochs=2)
        same_on_all_ranks(flat(net))
        assert np.abs(flat(net) - expected).max() < 1e-5, (kind, mode)
    for api, sgd in SGD.values():
        for memory in ("dgc", {"*kernel": "dgc:momentum=0.5", "*": "none"}):
            with raises(ConfigError, "momentum=0"):
                DistributedOptimizer(sgd(0.1, momentum=0.9), memory=memory)
        for other in (scaled(api, sgd(0.1, momentum=0.9)), api.optimizers.Adam(), api.optimizers.RMSprop(momentum=0.5)):
            with raises(ConfigError, "momentum=0"):
                DistributedOptimizer(other, memory="dgc")
        DistributedOptimizer(api.optimizers.RMSprop(), memory="dgc")


@check
def adam_leaves_its_first_moment_to_the_memory():
    """With its own beta_1 it is what it is with beta_1 = 0, where all variables are compressed; others keep theirs."""
    adam = {kind: (api, api.optimizers.Adam) for kind, (api, _) in SGD.items() if kind != "tf_keras-legacy"}
    for kind, mode in covering(itertools.product(adam, MODES)):
        api, make = adam[kind]
        results = []
        for beta in (0.8, 0.0):
            optimizer = make(0.01, beta_1=beta)
            optimizer = DistributedOptimizer(optimizer, rules={"*": "topk:0.1/rice/raw"}, memory="momentum:0.8")
            net = compiled(api, optimizer, **MODES[mode])
            fit(net, epochs=2)
            results.append(flat(net))
            assert optimizer.beta_1 == beta and optimizer.get_config()["beta_1"] == beta, (kind, mode)
        assert np.array_equal(*results), (kind, mode)
        same_on_all_ranks(results[0])
        exact = compiled(
            api, DistributedOptimizer(make(0.01, beta_1=0.8), compression="dense/raw", memory="momentum:0.8"), **MODES[mode]
        )
        fit(exact, epochs=2)
        assert np.abs(flat(exact) - alone(api, make(0.01, beta_1=0.8), epochs=2)).max() < 1e-4, (kind, mode)
    for api, make in adam.values():
        for optimizer, message in (
            (make(beta_1=0.9), "beta1=0.9 differ: use 'momentum:0.9'"),
            (scaled(api, make(beta_1=0.8)), "not inside of another optimizer"),
            (api.optimizers.Nadam(beta_1=0.8), "that of Nadam, 0.8, would be applied once more"),
        ):
            with raises(ConfigError, message):
                DistributedOptimizer(optimizer, memory="momentum:0.8")
        DistributedOptimizer(api.optimizers.SGD(), memory="momentum:0.8")


@check
def adam_steps_with_the_moments_of_the_memory():
    """With everything sent, V alone is estimated: a step has the direction of the gradient over the roots, in all modes alike."""
    adam = {kind: (api, api.optimizers.Adam) for kind, (api, _) in SGD.items() if kind != "tf_keras-legacy"}
    for kind, (api, make) in adam.items():
        results = []
        for mode in MODES:
            optimizer = DistributedOptimizer(make(0.01), rules={"*kernel": "topk:0.1/rice/raw"}, memory="adam")
            net = compiled(api, optimizer, **MODES[mode])
            before = flat(net)
            fit(net, epochs=2)
            same_on_all_ranks(flat(net))
            results.append(flat(net))
            assert 1e-3 < np.abs(results[-1] - before).max() < 1, (kind, mode)
            assert any(name.startswith("second_moment") for name in memory_of(optimizer)), (kind, mode)
        assert all(np.allclose(results[0], other, atol=1e-4) for other in results), kind
        optimizer = DistributedOptimizer(make(0.01))
        net = compiled(api, optimizer)
        fit(net, epochs=1)
        same_on_all_ranks(flat(net))
        found = [(str(b.compressor), b.memory.name) for b in exchange_of(optimizer._grace.reducer).buckets]
        assert {memory for _, memory in found} == {"adam", "residual"}, (kind, found)
        for optimizer, message in (
            (api.optimizers.SGD(), "not SGD"),
            (scaled(api, make()), "not inside of another optimizer"),
            (make(amsgrad=True), "amsgrad"),
        ):
            with raises(ConfigError, message):
                DistributedOptimizer(optimizer, memory="adam")
    with raises(ConfigError, "use DistributedOptimizer"):
        DistributedGradientTape(tf.GradientTape(), memory="adam")


@check
def adam_keeps_its_moments_whatever_auto_chooses():
    adam = {kind: (api, api.optimizers.Adam) for kind, (api, _) in SGD.items() if kind != "tf_keras-legacy"}
    options = {"memory": "adam", "rules": {"*kernel": "topk:0.1/rice/raw"}, "communicator": "auto"}
    for kind, mode in covering(itertools.product(adam, MODES)):
        api, make = adam[kind]
        for way in ("allgather", "float32", "fp16"):
            with always(way):
                optimizer = DistributedOptimizer(make(0.01), **options)
                net = compiled(api, optimizer, **MODES[mode])
                before = flat(net)
                fit(net, epochs=1)
            same_on_all_ranks(flat(net))
            assert 1e-3 < np.abs(flat(net) - before).max() < 1, (kind, mode, way)
            assert any(name.startswith("second_moment") for name in memory_of(optimizer)), (kind, mode, way)
            ways = exchange_of(optimizer._grace.reducer).stats()["ways"]
            assert set(ways.values()) == {way}, (kind, mode, ways)


@check
def what_is_sharded_is_what_one_process_gives_in_fit():
    for api, sgd in SGD.values():
        optimizer = DistributedOptimizer(sgd(0.1), compression="dense/deflate", memory="none", communicator="sharded")
        net = compiled(api, optimizer)
        fit(net, epochs=1)
        same_on_all_ranks(flat(net))
        assert np.abs(flat(net) - alone(api, sgd(0.1), epochs=1)).max() < 1e-5
        assert "sharded" in {bucket.communicator.name for bucket in exchange_of(optimizer._grace.reducer).buckets}


@check
def memories_by_name_and_schedules_in_fit():
    for kind, mode in covering(itertools.product(SGD, MODES)):
        api, sgd = SGD[kind]
        optimizer = DistributedOptimizer(
            sgd(0.1),
            rules={"*kernel*": "topk:0.01/rice/raw"},
            memory={"*hidden*": "none", "*kernel*": "ef21"},
            schedule={"density": lambda step: 0.5 if step < 6 else 0.02},
        )
        net = compiled(api, optimizer, **MODES[mode])
        fit(net, epochs=2)
        same_on_all_ranks(flat(net))
        names = {name.removesuffix("/kernel") for name in memory_of(optimizer)}
        assert names == {"estimate:last", "aggregate:last"}, (kind, mode, names)
        stats = optimizer.compression_stats()
        few, many = stats["last_step"]["compressed"]["bytes_out"], stats["compressed"]["bytes_out"] / 8
        assert many > 5 * few > 0, (kind, mode, stats)


@check
def a_skipped_step_leaves_every_kind_of_memory_alone():
    for kind, memory in covering(itertools.product(SGD, ("dgc", "ef21:momentum=0.5"))):
        api, sgd = SGD[kind]
        optimizer = DistributedOptimizer(scaled(api, sgd(0.1)), rules=RULES, memory=memory)
        _skip_a_step(compiled(api, optimizer), optimizer, (kind, memory))


def stopping(api, at):
    class Stop(api.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == at:
                raise KeyboardInterrupt

    return Stop()


def run(api, make, passes, folder, stop=None):
    net = compiled(api, make())
    callbacks = [
        BroadcastGlobalVariablesCallback(0),
        CompressionStateCallback(f"{folder}/state"),
        api.callbacks.BackupAndRestore(f"{folder}/keras"),
    ]
    fit(net, passes=passes, epochs=4, callbacks=[*callbacks, stopping(api, stop)])
    return net


@check
def fit_goes_on_after_an_interruption_bit_by_bit():
    for kind, (memory, passes) in covering(itertools.product(SGD, (("dgc", 2), ("residual", 1)))):
        api, sgd = SGD[kind]

        def make(sgd=sgd, memory=memory, passes=passes):
            # Three passes an update and eight batches an epoch: it is interrupted in the middle of an update.
            return DistributedOptimizer(
                sgd(0.1, momentum=0.0 if memory == "dgc" else 0.9),
                rules=RULES,
                memory=memory,
                backward_passes_per_step=2 * passes - 1,
            )

        with tempfile.TemporaryDirectory() as folder:  # of each rank
            plain = run(api, make, passes, f"{folder}/plain")
            with raises(KeyboardInterrupt, ""):
                run(api, make, passes, folder, stop=2)
            again = run(api, make, passes, folder)
        case = (kind, memory)
        assert np.array_equal(flat(plain), flat(again)), case
        assert np.array_equal(state(plain.optimizer), state(again.optimizer)), case
        memories = memory_of(plain.optimizer), memory_of(again.optimizer)
        assert memories[0].keys() == memories[1].keys() and memories[0], case
        assert all(np.array_equal(array, memories[1][name]) for name, array in memories[0].items()), case
        same_on_all_ranks(flat(again))


@check
def states_from_different_backward_passes_begin_a_new_update():
    """Each rank saves after another one of three passes; what they had summed up is not of one update."""
    for kind, (api, sgd) in SGD.items():
        net = model(api)
        optimizer = DistributedOptimizer(sgd(0.1), rules=RULES, backward_passes_per_step=3)

        def call(net=net, optimizer=optimizer):
            optimizer.apply_gradients([(tf.ones(v.shape), v) for v in net.trainable_variables])

        states = []
        for _ in range(6):
            call()
            states.append(optimizer.compression_state())
        before = flat(net)
        optimizer.load_compression_state(states[3 + hvd.rank() % 2])
        for number in range(3):
            assert np.array_equal(before, flat(net)), (kind, number)
            call()
        assert not np.array_equal(before, flat(net)), kind


@check
def fit_takes_over_from_other_numbers_of_ranks():
    api, sgd = SGD["keras"]
    size, lines = BATCH // hvd.size(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("grace_ext")
    level = log.level

    def make(folder, **options):
        net = compiled(api, DistributedOptimizer(sgd(0.1), rules=RULES))
        fit(net, part(X)[:size], part(Y)[:size])
        callback = CompressionStateCallback(folder, **options)
        callback.set_model(net)
        return net, callback

    with tempfile.TemporaryDirectory() as folder:
        net, callback = make(folder)
        callback.on_epoch_end(0)
        mine = saved_state.read(f"{folder}/1/rank{hvd.rank()}.npz")
        (layout,), more = mine["layouts"], hvd.size() + 1
        (memory,) = layout["memories"].values()
        for rank in range(more):
            memory = {field: {name: array + np.float32(1) for name, array in kept.items()} for field, kept in memory.items()}
            saved_state.write(
                f"{folder}/1/rank{rank}.npz",
                {"rank": rank, "ranks": more, "layouts": [{**layout, "ranks": more, "memories": {rank: memory}}]},
            )
        for on_resize, word, factor in ((None, "redistributed", more / hvd.size()), ("reset", "zero", 0)):
            net, callback = make(folder, on_resize=on_resize)
            log.addHandler(handler)
            log.setLevel(logging.INFO)
            try:
                callback.on_train_begin()
                callback.on_epoch_begin(0)
            finally:
                log.removeHandler(handler)
                log.setLevel(level)
            assert hvd.rank() or word in lines[-1], lines
            ours = memory_of(net.optimizer).get("residual:hidden/kernel", 0)
            mean = memory["residual"]["hidden/kernel"] - np.float32((more - 1) / 2)
            assert np.allclose(ours, factor * mean, atol=1e-5), on_resize


@check
def saves_that_are_not_needed_any_more_go():
    api, sgd = SGD["keras"]
    with tempfile.TemporaryDirectory() as folder:
        net = compiled(api, DistributedOptimizer(sgd(0.1), rules=RULES))
        fit(
            net,
            epochs=3,
            callbacks=[CompressionStateCallback(folder, save_freq=3), CompressionStateCallback(f"{folder}/all", keep=None)],
        )
        assert sorted(os.listdir(folder)) == ["12", "9", "all"] and sorted(os.listdir(f"{folder}/all")) == ["12", "4", "8"]
    for options in ({"save_freq": 0}, {"keep": 0}, {"save_freq": "batch"}):
        with raises(ConfigError, next(iter(options))):
            CompressionStateCallback(folder, **options)


@check
def broadcasting_variables_touches_no_memory():
    for kind, (api, sgd) in SGD.items():
        net = compiled(api, DistributedOptimizer(sgd(0.1, momentum=0.9), rules={"*kernel*": "topk:0.1"}))
        fit(net)
        before = memory_of(net.optimizer)
        callback = BroadcastGlobalVariablesCallback(0)
        callback.set_model(net)
        callback.on_train_begin()
        after = memory_of(net.optimizer)
        assert before and all(np.array_equal(array, after[name]) for name, array in before.items()), kind
        own = np.concatenate(list(after.values()))
        first, *_, last = of_all_ranks(own)
        assert not np.array_equal(first, last), kind

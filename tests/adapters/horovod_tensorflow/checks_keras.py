"""What is checked inside the ranks of one job: Keras optimizers and callbacks, of Keras 3 and of tf_keras."""

import itertools
import os
import tempfile

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import tf_keras
from harness import of_all_ranks, same_on_all_ranks
from support.checking import check, covering, raises
from support.exchanges import arrays_of

from grace_ext import ConfigError, ExchangeError
from grace_ext.adapters.horovod_tensorflow import (
    BroadcastGlobalVariablesCallback,
    CompressionStatsCallback,
    DistributedGradientTape,
    DistributedOptimizer,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    broadcast_variables,
    load_model,
)

SGD = {
    "keras": (keras, keras.optimizers.SGD),
    "tf_keras": (tf_keras, tf_keras.optimizers.SGD),
    "tf_keras-legacy": (tf_keras, tf_keras.optimizers.legacy.SGD),
}
MODES = {"graph": {}, "eager": {"run_eagerly": True}, "four-steps": {"steps_per_execution": 4}}
BATCH = 48  # of all ranks together
GENERATOR = np.random.default_rng(7)
X = GENERATOR.standard_normal((4 * BATCH, 20)).astype(np.float32)
Y = np.tanh(X @ GENERATOR.standard_normal((20, 3))).astype(np.float32)


def model(api, seed=1):
    api.utils.set_random_seed(seed)
    inputs = api.Input((20,))
    hidden = api.layers.Dense(128, activation="tanh", name="hidden")(inputs)
    return api.Model(inputs, api.layers.Dense(3, name="last")(hidden))


def part(array):
    """This rank's share of every joined batch."""
    return array.reshape(-1, hvd.size(), BATCH // hvd.size(), array.shape[1])[:, hvd.rank()].reshape(-1, array.shape[1])


def fit(net, x=None, y=None, passes=1, epochs=1, callbacks=()):
    x, y = (part(X), part(Y)) if x is None else (x, y)
    return net.fit(
        x, y, batch_size=BATCH // hvd.size() // passes, shuffle=False, verbose=0, epochs=epochs, callbacks=list(callbacks)
    )


def compiled(api, optimizer, **options):
    net = model(api)
    net.compile(optimizer, api.losses.MeanSquaredError(), **options)
    return net


def flat(net):
    return np.concatenate([np.asarray(weight).ravel() for weight in net.trainable_variables])


def variables_of(optimizer):
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def state(optimizer):
    return np.concatenate([np.asarray(variable).astype(np.float64).ravel() for variable in variables_of(optimizer)])


def alone(api, optimizer, epochs=1):
    """One process with the joined batches."""
    net = compiled(api, optimizer)
    net.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, epochs=epochs)
    return flat(net)


@check
def a_rank_may_have_made_layers_that_others_have_not():
    """Keras then numbers those that follow otherwise. randomk: the ranks have to draw the same positions."""
    for api in (keras, tf_keras):
        for _ in range(hvd.rank()):
            api.layers.Dense(3)
        inputs = api.Input((20,))
        hidden = api.layers.Dense(128, activation="tanh")(inputs)
        net = api.Model(inputs, api.layers.Dense(3)(hidden))
        optimizer = DistributedOptimizer(api.optimizers.SGD(0.01), compression="randomk:0.5", communicator="allreduce")
        net.compile(optimizer, api.losses.MeanSquaredError(), jit_compile=False)
        broadcast_variables(net.trainable_variables)
        fit(net)
        same_on_all_ranks(flat(net))


@check
def dense_fit_equals_one_process_with_the_joined_batch():
    for kind, mode in covering(itertools.product(SGD, MODES)):
        api, sgd = SGD[kind]
        expected = alone(api, sgd(0.1, momentum=0.9, clipnorm=0.05), epochs=2)
        optimizer = DistributedOptimizer(sgd(0.1, momentum=0.9, clipnorm=0.05), compression="dense/raw")
        net = compiled(api, optimizer, **MODES[mode])
        fit(net, epochs=2)
        same_on_all_ranks(flat(net))
        assert np.abs(flat(net) - expected).max() < 1e-5, (kind, mode, np.abs(flat(net) - expected).max())
        assert optimizer.compression_stats()["steps"] == 8, (kind, mode)


@check
def compressed_fit_is_bit_identical_and_learns():
    for kind, mode in covering(itertools.product(SGD, [*MODES][::-1])):
        api, sgd = SGD[kind]
        optimizer = DistributedOptimizer(sgd(0.1), compression="topk:0.1", rules={"*": "topk:0.1/rice/qsgd:7"})
        net = compiled(api, optimizer, **MODES[mode])
        losses = fit(net, epochs=20).history["loss"]
        same_on_all_ranks(flat(net))
        same_on_all_ranks(state(optimizer))
        assert losses[-1] < 0.5 * losses[0], (kind, mode, losses)
        assert optimizer.compression_stats()["ratio"] > 10, (kind, mode, optimizer.compression_stats())


@check
def custom_loops_with_apply_apply_gradients_and_minimize():
    x, y = part(X), part(Y)
    for kind, (api, sgd) in SGD.items():
        expected = None
        for in_graph in (True, False):
            net, optimizer = model(api), DistributedOptimizer(sgd(0.1), compression="dense/raw")

            def loss(net=net):
                return tf.reduce_mean((net(x) - y) ** 2)

            def by_apply_gradients(net=net, loss=loss, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    value = loss()
                variables = net.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))

            def otherwise(net=net, loss=loss, optimizer=optimizer, kind=kind):
                if kind == "keras":
                    with tf.GradientTape() as tape:
                        value = loss()
                    optimizer.apply(tape.gradient(value, net.trainable_variables), net.trainable_variables)
                else:
                    optimizer.minimize(loss, net.trainable_variables)

            for step in (by_apply_gradients, otherwise):
                step = tf.function(lambda step=step: step()) if in_graph else step
                for _ in range(3):
                    step()
            same_on_all_ranks(flat(net))
            assert optimizer.compression_stats()["steps"] == 6
            if expected is not None:
                assert np.abs(flat(net) - expected).max() < 1e-6, kind
            expected = flat(net)


def scaled(api, optimizer, initial_scale=1024.0):
    wrap = keras.optimizers.LossScaleOptimizer if api is keras else tf_keras.mixed_precision.LossScaleOptimizer
    return wrap(optimizer, initial_scale=initial_scale)


@check
def an_infinite_gradient_on_one_rank_makes_all_skip_the_step():
    for kind, outside, mode in covering(
        [
            ("keras", True, "eager"),
            ("tf_keras", False, "graph"),
            ("tf_keras-legacy", True, "graph"),
            ("keras", True, "graph"),
            ("tf_keras", True, "graph"),
            ("tf_keras-legacy", False, "graph"),
        ]
    ):
        api, sgd = SGD[kind]
        inner = sgd(0.1)
        wrapped = DistributedOptimizer(scaled(api, inner) if outside else inner)
        optimizer = wrapped if outside else scaled(api, wrapped)
        net = compiled(api, optimizer, **MODES[mode])
        _skip_a_step(net, wrapped, (kind, outside, mode))


def _skip_a_step(net, wrapped, case):
    def memory():
        (layout,) = wrapped._grace.reducer._layouts.values()
        return arrays_of(layout.exchange)

    def scale():
        name = "dynamic_scale" if hasattr(net.optimizer, "dynamic_scale") else "loss_scale"
        return float(np.asarray(getattr(net.optimizer, name)))

    fit(net)
    before, weights = memory(), flat(net)
    largest = max(np.abs(array).max() for array in before.values())
    assert 0 < largest < 5, f"{case}: the memory is not in unscaled units, {largest}"
    poisoned = part(Y).copy()
    if hvd.rank() == hvd.size() - 1:
        poisoned[0, 0] = np.inf
    size = BATCH // hvd.size()
    fit(net, part(X)[:size], poisoned[:size])
    assert scale() == 512 and np.array_equal(weights, flat(net)), case
    assert before.keys() == memory().keys() and all(np.array_equal(before[name], memory()[name]) for name in before), case
    fit(net)
    assert np.isfinite(flat(net)).all() and not np.array_equal(weights, flat(net)), case
    same_on_all_ranks(flat(net))


@check
def small_gradients_reach_float16_scaled():
    for in_graph in (True, False):
        variable = keras.Variable(np.zeros((40, 40), np.float32))
        optimizer = DistributedOptimizer(scaled(keras, keras.optimizers.SGD(1.0)), compression=hvd.Compression.fp16)

        def step(variable=variable, optimizer=optimizer):  # builds the optimizer, too
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(1e-9 * tf.reduce_sum(variable))
            optimizer.apply(tape.gradient(loss, [variable]), [variable])

        tf.function(lambda step=step: step())() if in_graph else step()
        assert np.allclose(np.asarray(variable), -1e-9, rtol=0.05, atol=0), np.asarray(variable)[0, :3]


@check
def backward_passes_equal_one_process_with_all_their_batches():
    for kind, mode, with_scale in covering(itertools.product(SGD, MODES, (False, True))):
        api, sgd = SGD[kind]
        expected = alone(api, sgd(0.1, momentum=0.9, clipnorm=0.05))
        optimizer = sgd(0.1, momentum=0.9, clipnorm=0.05)
        optimizer = scaled(api, optimizer) if with_scale else optimizer
        optimizer = DistributedOptimizer(
            optimizer, compression="dense/raw", backward_passes_per_step=2, average_aggregated_gradients=True
        )
        net = compiled(api, optimizer, **MODES[mode])
        fit(net, passes=2)
        same_on_all_ranks(flat(net))
        assert np.abs(flat(net) - expected).max() < 1e-5, (kind, mode, with_scale)
        assert optimizer.compression_stats()["steps"] == 4 and int(np.asarray(optimizer.iterations)) == 8


@check
def what_keras_accumulates_is_exchanged_once():
    expected = alone(keras, keras.optimizers.SGD(0.1, global_clipnorm=0.1))
    for with_scale, mode in covering(itertools.product((False, True), MODES)):
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.1, gradient_accumulation_steps=2)
        optimizer = DistributedOptimizer(scaled(keras, optimizer) if with_scale else optimizer, compression="dense/raw")
        net = compiled(keras, optimizer, **MODES[mode])
        fit(net, passes=2)
        same_on_all_ranks(flat(net))
        assert np.abs(flat(net) - expected).max() < 1e-5, (with_scale, mode)
        assert optimizer.compression_stats()["steps"] == (8 if with_scale else 4), (with_scale, mode)
        assert int(np.asarray(optimizer.iterations)) == 4


@check
def sparse_gradients_of_several_passes():
    ways = (False, 1, False), (True, 1, False), (False, 2, True), (False, 2, False)
    for kind, (dense, passes, average) in covering(itertools.product(SGD, ways)):
        api, sgd = SGD[kind]
        table = api.layers.Embedding(50, 4)
        table.build(None)
        (rows,) = table.trainable_variables
        rows.assign(tf.zeros((50, 4)))
        optimizer = DistributedOptimizer(
            sgd(1.0),
            compression="dense/raw",
            op=hvd.Sum,
            sparse_as_dense=dense,
            backward_passes_per_step=passes,
            average_aggregated_gradients=average,
        )

        def step(indices, table=table, rows=rows, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table(indices))
            (gradient,) = tape.gradient(loss, [rows])
            assert isinstance(gradient, tf.IndexedSlices)
            optimizer.apply_gradients([(gradient, rows)])

        in_graph = tf.function(lambda indices, step=step: step(indices))
        for indices in ([hvd.rank(), 40], [40, 40, hvd.rank() + 10]):
            in_graph(tf.constant(indices))
        expected = np.zeros(50)
        expected[[*range(hvd.size()), *range(10, 10 + hvd.size())]] = -1
        expected[40] = -3 * hvd.size()
        expected /= passes if average else 1
        case = (kind, dense, passes, average)
        assert np.allclose(np.asarray(rows)[:, 0], expected), (case, np.asarray(rows)[:, 0])


@check
def a_local_variable_is_not_exchanged():
    for kind, (api, sgd) in SGD.items():
        net = model(api)
        optimizer = DistributedOptimizer(sgd(0.1), compression="dense/raw")
        kernel = net.get_layer("last").kernel
        optimizer.register_local_var(kernel.value if kind == "keras" else kernel)  # the tf.Variable in it
        net.compile(optimizer, api.losses.MeanSquaredError())
        fit(net)
        local = np.asarray(net.get_layer("last").kernel)
        others = of_all_ranks(local)
        assert not np.array_equal(others[0], others[-1]), kind
        same_on_all_ranks(np.asarray(net.get_layer("last").bias))
    variable = keras.Variable(np.zeros(3, np.float32))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable.value) * (hvd.rank() + 1)
    tape = DistributedGradientTape(tape, scale_local_gradients=False)
    tape.register_local_source(variable)
    assert np.array_equal(tape.gradient(loss, [variable.value])[0], [hvd.rank() + 1] * 3)


@check
def xla_is_refused_with_what_to_write():
    for api, sgd in SGD.values():
        net = compiled(api, DistributedOptimizer(sgd(0.1)), jit_compile=True)
        with raises(ConfigError, "jit_compile=False"):
            fit(net)


@check
def a_distribution_strategy_is_refused():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    for kind, (_, sgd) in SGD.items():
        with strategy.scope():
            variable, optimizer = tf.Variable(1.0), DistributedOptimizer(sgd(0.1))

        def step(variable=variable, optimizer=optimizer):
            optimizer.apply_gradients([(tf.constant(1.0), variable)])

        with raises(ConfigError, "tf.distribute"):
            strategy.run(step)
        assert variable.numpy() == 1, kind


@check
def ranks_with_other_options_are_told():
    net = compiled(keras, DistributedOptimizer(keras.optimizers.SGD(0.1), compression=f"topk:0.0{hvd.rank() + 1}"))
    with raises(ConfigError, "than rank 0"):
        fit(net)


@check
def a_multi_optimizer_exchanges_once_for_all():
    for passes in (1, 2):
        optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
        optimizers["last/.*"] = keras.optimizers.Adam(0.01)
        optimizer = DistributedOptimizer(keras.optimizers.MultiOptimizer(optimizers), backward_passes_per_step=passes)
        net = compiled(keras, optimizer)
        fit(net, passes=passes)
        same_on_all_ranks(flat(net))
        assert optimizer.compression_stats()["steps"] == 4
        assert [int(inner.iterations) for inner in optimizer.optimizers] == [4 * passes] * 2


@check
def a_saved_model_goes_on():
    for kind, (api, sgd) in SGD.items():
        net = compiled(api, DistributedOptimizer(sgd(0.1, momentum=0.9), compression="dense/raw"))
        fit(net)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.h5" if kind == "tf_keras-legacy" else "x.keras")
            net.save(path)
            loaded = load_model(path, keras=api, compression="dense/raw")
        fit(net)
        fit(loaded)
        same_on_all_ranks(flat(loaded))
        assert np.abs(flat(net) - flat(loaded)).max() < 1e-6, kind
        assert loaded.optimizer.compression_stats()["steps"] == 4


@check
def callbacks_bring_ranks_together():
    for kind, build in covering(itertools.product(SGD, ("at once", "late", "late on others"))):
        _callbacks(kind, *SGD[kind], build)


def _callbacks(kind, api, sgd, build):
    api.utils.set_random_seed(hvd.rank())
    shape = [api.Input((20,))] if build == "at once" or build == "late on others" and hvd.rank() == 0 else []
    net = api.Sequential(
        [
            *shape,
            api.layers.Dense(80, activation="tanh", name="hidden"),
            api.layers.Dropout(0.5),
            api.layers.BatchNormalization(name="norm"),
            api.layers.Dense(3, name="last"),
        ]
    )
    optimizer = sgd(0.04, momentum=0.5)
    if build == "at once" and hvd.rank() == 0:  # as from a checkpoint that only rank 0 has
        net.compile(optimizer, api.losses.MeanSquaredError())
        fit(net)
    net.compile(DistributedOptimizer(optimizer), api.losses.MeanSquaredError(), metrics=["mae"])
    seen, rates = [], []

    class Later(api.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    with tempfile.TemporaryDirectory() as folder:
        history = fit(
            net,
            epochs=3,
            callbacks=[
                BroadcastGlobalVariablesCallback(0),
                MetricAverageCallback(),
                CompressionStatsCallback(folder),
                LearningRateWarmupCallback(0.08, warmup_epochs=2),
                Later(),
            ],
        ).history
        written = {
            value.tag: event.step
            for name in os.listdir(folder)
            for event in tf.compat.v1.train.summary_iterator(os.path.join(folder, name))
            for value in event.summary.value
        }
    case = (kind, build)
    same_on_all_ranks(flat(net))
    same_on_all_ranks(state(optimizer))
    assert int(np.asarray(optimizer.iterations)) == (16 if build == "at once" else 12), case
    same_on_all_ranks(np.array([history["loss"], history["mae"], history["lr"]]))
    assert [entry["loss"] for entry in seen] == history["loss"], case
    assert history["compression_ratio"][-1] > 1 and history["wire_mb"][-1] > 0, case
    assert (written.get("compression/ratio") == int(np.asarray(optimizer.iterations))) == (hvd.rank() == 0), (case, written)
    expected = [0.08 / hvd.size() * (step / 8 * (hvd.size() - 1) + 1) for step in range(1, 9)]
    assert np.allclose(rates, expected + [0.08] * 4), (case, rates)


@check
def metrics_of_other_names_are_told():
    callback = MetricAverageCallback()
    logs = {"b": hvd.rank(), "a": 1.0, "table": np.zeros(3)}
    callback.on_epoch_end(0, logs)
    assert logs["a"] == 1 and logs["b"] == (hvd.size() - 1) / 2
    for logs in ({"loss": 1.0, f"other{hvd.rank()}": 2.0}, dict.fromkeys("abcd"[: 1 + hvd.rank()], 1.0)):
        with raises(ExchangeError, "ranks have other metrics"):
            callback.on_epoch_end(0, logs)


@check
def variables_of_all_dtypes_are_broadcast():
    dtypes = (tf.bool, tf.int8, tf.uint32, tf.int64, tf.float16, tf.bfloat16, tf.float64, tf.complex64)
    variables = [tf.Variable(tf.cast(tf.fill([3, 2], hvd.rank() + 1), dtype)) for dtype in dtypes]
    variables += [tf.Variable(float(hvd.rank())), tf.Variable(tf.zeros((0, 3))), keras.Variable(float(hvd.rank()) + 2)]
    root = hvd.size() - 1
    broadcast_variables(variables, root)
    for variable, dtype in zip(variables, dtypes, strict=False):
        assert np.array_equal(variable.numpy(), tf.cast(tf.fill([3, 2], root + 1), dtype).numpy()), dtype
    assert variables[-3].numpy() == root and variables[-1].numpy() == root + 2
    with raises(ExchangeError, "other shapes or dtypes"):
        broadcast_variables([tf.Variable(tf.zeros(1 + hvd.rank()))], 0)
    with raises(ConfigError, "outside"):
        tf.function(lambda: broadcast_variables(variables, 0))()

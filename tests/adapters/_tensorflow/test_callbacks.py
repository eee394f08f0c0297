"""Callbacks of both Kerases in one process."""

import subprocess
import sys

import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
tf_keras = pytest.importorskip("tf_keras")
hvd = pytest.importorskip("horovod.tensorflow")
np = pytest.importorskip("numpy")

from grace_ext import ConfigError  # noqa: E402
from grace_ext.adapters.horovod_tensorflow import (  # noqa: E402
    BroadcastGlobalVariablesCallback,
    CompressionStatsCallback,
    DistributedOptimizer,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    broadcast_variables,
)

pytestmark = pytest.mark.tier("test")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """Not at import: Horovod knows its process sets through the framework that was initialized or imported last."""
    hvd.init()


SGD = {
    "keras": (keras, keras.optimizers.SGD),
    "tf_keras": (tf_keras, tf_keras.optimizers.SGD),
    "tf_keras-legacy": (tf_keras, tf_keras.optimizers.legacy.SGD),
}
every_kind = pytest.mark.parametrize("kind", SGD)
X = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(24, 1)).astype(np.float32)


def compiled(api, optimizer):
    api.utils.set_random_seed(1)
    net = api.Sequential([api.Input((5,)), api.layers.Dense(1)])
    net.compile(optimizer, api.losses.MeanSquaredError())
    return net


def fit(net, *callbacks, epochs=1):
    return net.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


@every_kind
def test_with_one_rank_they_change_nothing(kind):
    api, sgd = SGD[kind]
    ours = compiled(api, DistributedOptimizer(sgd(0.1)))
    theirs = compiled(api, sgd(0.1))
    history = fit(
        ours,
        BroadcastGlobalVariablesCallback(0),
        MetricAverageCallback(),
        CompressionStatsCallback("unused"),
        LearningRateWarmupCallback(0.1, 1),
    )
    assert history.history.keys() == {"loss", "lr"}
    assert history.history["loss"] == fit(theirs).history["loss"]
    np.testing.assert_array_equal(ours.get_weights()[0], theirs.get_weights()[0])


def test_they_are_callbacks_of_both_kerases():
    class Mine(MetricAverageCallback):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            logs["mine"] = 1.0

    for callback in (Mine(), BroadcastGlobalVariablesCallback(0)):
        assert isinstance(callback, keras.callbacks.Callback) and isinstance(callback, tf_keras.callbacks.Callback)
    for api, sgd in SGD.values():
        assert fit(compiled(api, sgd(0.1)), Mine()).history["mine"] == [1.0]


def test_made_before_any_keras_is_used():
    script = (
        "import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'\n"
        "import horovod.tensorflow as hvd, numpy as np, tensorflow as tf\n"
        "from grace_ext.adapters.horovod_tensorflow import MetricAverageCallback\n"
        "hvd.init()\n"
        "callback = MetricAverageCallback()\n"
        "net = tf.keras.Sequential([tf.keras.layers.Dense(1)])\n"
        "assert tf.keras.__name__.startswith('tf_keras')\n"
        "net.compile('sgd', 'mse')\n"
        "net.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[callback])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@every_kind
def test_a_schedule_corrects_the_momentum(kind):
    api, sgd = SGD[kind]
    for correction in (True, False):
        net = compiled(api, sgd(0.1, momentum=0.9))
        weight, bias = (np.float64(value) for value in net.get_weights())
        history = fit(
            net,
            LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, staircase=False, momentum_correction=correction),
            epochs=2,
        )
        velocity, rate = [np.zeros((5, 1)), np.zeros(1)], 0.1
        for step in range(6):
            x, y = (array[step % 3 * 8 : step % 3 * 8 + 8] for array in (X, Y))
            before, rate = rate, 0.1 * (1 + step / 3)
            error = 2 * (x @ weight + bias - y) / 8
            scale = rate / before if correction else 1.0
            velocity = [0.9 * scale * v - rate * g for v, g in zip(velocity, (x.T @ error, error.sum(0)), strict=True)]
            weight, bias = weight + velocity[0], bias + velocity[1]
        np.testing.assert_allclose(net.get_weights()[0], weight, atol=1e-5)
        np.testing.assert_allclose(history.history["lr"], [0.1 * 5 / 3, 0.1 * 8 / 3], rtol=1e-6)


@every_kind
def test_a_staircase(kind):
    api, sgd = SGD[kind]
    history = fit(compiled(api, sgd(0.5)), LearningRateScheduleCallback(0.4, 0.5, start_epoch=1, end_epoch=3), epochs=4)
    np.testing.assert_allclose(history.history["lr"], [0.5, 0.4, 0.2, 0.2], rtol=1e-6)


@every_kind
def test_a_schedule_of_the_optimizer_is_refused(kind):
    api, sgd = SGD[kind]
    net = compiled(api, sgd(api.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)))
    with pytest.raises(ConfigError, match="schedule of its own"):
        fit(net, LearningRateScheduleCallback(0.1, 0.5))


def test_what_cannot_be_honoured_is_refused():
    for make in (lambda: BroadcastGlobalVariablesCallback(0, "/gpu:0"), lambda: MetricAverageCallback("/cpu:0")):
        with pytest.raises(ConfigError, match="device"):
            make()
    with pytest.raises(ConfigError, match="initial_lr"):
        LearningRateScheduleCallback(None, 0.5)
    with pytest.raises(ConfigError, match="not compiled with a DistributedOptimizer"):
        fit(compiled(keras, keras.optimizers.SGD()), CompressionStatsCallback())
    endless = tf.data.Dataset.from_tensors((X, Y)).repeat()
    callback = LearningRateWarmupCallback(0.1)
    callback.set_params({"steps": None})
    with pytest.raises(ConfigError, match="give steps_per_epoch"):
        callback.on_train_begin()
    compiled(keras, keras.optimizers.SGD()).fit(
        endless, steps_per_epoch=2, verbose=0, callbacks=[LearningRateWarmupCallback(0.1, steps_per_epoch=2)]
    )
    with pytest.raises(ConfigError, match="outside"):
        tf.function(lambda: broadcast_variables([tf.Variable(1.0)]))()

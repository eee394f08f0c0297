"""What is checked inside the ranks of one job: rounds of local steps in Keras' fit."""

import os
import sys
from pathlib import Path
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import tf_keras
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError
from grace_ext.adapters._common import state_files
from grace_ext.adapters.horovod_tensorflow import DistributedOptimizer
from grace_ext.adapters.local_steps_keras import LocalStepsCallback
from grace_ext.means import ClippedMean, Median
from grace_ext.rounds.header import HEADER

APIS = (keras, tf_keras)
BATCH = 8  # of each rank
GENERATOR = np.random.default_rng(5)
X = GENERATOR.standard_normal((6, 4, BATCH, 12)).astype(np.float32)  # by step and rank
Y = np.tanh(X @ GENERATOR.standard_normal((12, 3))).astype(np.float32)


def data(rank=None, steps=6):
    """One rank's batches; those of the first ranks, joined, for a tuple of ranks."""
    ranks = [hvd.rank() if rank is None else rank] if not isinstance(rank, tuple) else list(rank)
    return tuple(array[:steps, ranks].reshape(-1, array.shape[-1]) for array in (X, Y))


def compiled(api, optimizer=None, normalized=False, seed=1, **options):
    api.utils.set_random_seed(seed)
    inputs = api.Input((12,))
    hidden = api.layers.Dense(96, activation="tanh", name="hidden")(inputs)
    if normalized:
        hidden = api.layers.BatchNormalization(name="normalized")(hidden)
    net = api.Model(inputs, api.layers.Dense(3, name="last")(hidden))
    net.compile(api.optimizers.SGD(0.1) if optimizer is None else optimizer, api.losses.MeanSquaredError(), **options)
    return net


def fit(net, callbacks, given=None, batch=BATCH, epochs=1, **options):
    x, y = data() if given is None else given
    return net.fit(x, y, batch_size=batch, shuffle=False, verbose=0, epochs=epochs, callbacks=callbacks, **options)


def flat(net):
    return np.concatenate([np.asarray(value, np.float32).reshape(-1) for value in net.get_weights()])


def same_on_all_ranks(net):
    rows = hvd.allgather(flat(net)[None], name="same").numpy()
    assert (rows == rows[0]).all(), "ranks hold different bits"


@check_under_every_launcher
def rounds_of_a_step_are_training_with_all_batches():
    for api in APIS:
        net, alone = compiled(api, seed=hvd.rank()), compiled(api, seed=0)
        fit(net, [LocalStepsCallback("fedavg", steps=1)])
        fit(alone, [], data(tuple(range(hvd.size()))), BATCH * hvd.size())
        np.testing.assert_allclose(flat(net), flat(alone), rtol=1e-4, atol=1e-5)
        same_on_all_ranks(net)


@check_under_every_launcher
def ranks_have_the_same_bits_at_the_end():
    for api, options in ((keras, {}), (tf_keras, {"fragments": 2, "delay": 1, "steps": 4}), (keras, {"preset": "diloco"})):
        net = compiled(api, api.optimizers.Adam(1e-2), normalized=True)
        before = flat(net)
        callback = LocalStepsCallback(**{"steps": 2, **options})
        fit(net, [callback], data(steps=6 - hvd.rank() % 2))  # some ranks have a batch less
        same_on_all_ranks(net)
        assert (flat(net) != before).any()
        fit(net, [callback])
        same_on_all_ranks(net)
        stats = callback.compression_stats()
        assert stats["local_steps"] == 12 - hvd.rank() % 2 and stats["bytes_out"] > 0


@check
def validation_is_of_what_the_ranks_share():
    net, seen = compiled(keras), []
    callback = LocalStepsCallback("fedavg", steps=4)

    class Look(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            seen.append(flat(self.model))

    started = flat(compiled(keras))
    history = fit(net, [callback, Look()], data(steps=3), validation_data=data(0, 1), validation_batch_size=BATCH)
    assert seen and all((one == started).all() for one in seen)  # no round has ended yet
    assert (flat(net) != started).any() and "val_loss" in history.history
    same_on_all_ranks(net)


@check
def training_goes_on_bit_for_bit_from_a_file():
    folder = Path(sys.argv[1])
    for api in APIS:
        path = folder / f"{api.__name__}{hvd.rank()}.npz"
        net, callback = compiled(api), LocalStepsCallback("sparseloco", steps=2)
        fit(net, [callback])
        weights = net.get_weights()
        callback.consolidate()
        one = hvd.broadcast_object(str(path), name="path")
        callback.save(path)
        callback.save(path)  # again, in its place
        assert hvd.rank() or len(state_files.read(path)["turns"]["0"]["fragment"]["exchange"]["memories"]) == hvd.size()
        hvd.allreduce(tf.constant(0.0), name="saved")
        fit(net, [callback], data(steps=4))
        other, resumed = compiled(api, seed=9), LocalStepsCallback("sparseloco", steps=2)
        other.set_weights(weights)
        resumed.load(one)
        fit(other, [resumed], data(steps=4))
        assert (flat(net) == flat(other)).all()
        assert resumed.compression_stats()["local_steps"] == 10


@check
def training_goes_on_bit_for_bit_from_the_middle_of_a_round():
    for api in APIS:
        path = Path(sys.argv[1]) / f"amid{api.__name__}{hvd.rank()}.npz"
        callback, kept = LocalStepsCallback("sparseloco", steps=3), []

        class Save(api.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, save=callback.save, kept=kept, path=path):
                if batch == 3:
                    save(path)
                    kept[:] = self.model.get_weights()

        net = compiled(api, normalized=True)
        fit(net, [callback, Save()])
        other, resumed = compiled(api, normalized=True, seed=9), LocalStepsCallback("sparseloco", steps=3)
        other.set_weights(kept)
        resumed.load(path)
        fit(other, [resumed], tuple(array[4 * BATCH :] for array in data()))
        assert (flat(net) == flat(other)).all()


@check
def frozen_layers_take_no_part():
    for api in APIS:
        net = compiled(api, normalized=True)
        net.get_layer("hidden").trainable = False
        net.compile(api.optimizers.SGD(0.1), "mse")
        frozen = [value.copy() for value in net.get_layer("hidden").get_weights()]
        callback = LocalStepsCallback("fedavg", steps=2, mean=ClippedMean(radius=0.1))
        fit(net, [callback])
        for before, after in zip(frozen, net.get_layer("hidden").get_weights(), strict=True):
            assert (before == after).all()
        stats = callback.compression_stats()
        assert stats["other_bytes_out"] == stats["rounds"] * (HEADER.itemsize + 2 * 96 * 4)  # BatchNorm's averages


@check
def a_rank_that_is_not_finite_takes_over_what_the_others_share():
    net, callback = compiled(keras, keras.optimizers.Adam(1e-2)), LocalStepsCallback("fedavg", steps=2)
    x, y = data()
    if hvd.rank() == 1:
        x = x.copy()
        x[0] = np.nan
    fit(net, [callback], (x, y))
    assert np.isfinite(flat(net)).all()
    same_on_all_ranks(net)
    assert callback.compression_stats()["lost_rounds"] == int(hvd.rank() == 1)


@check
def what_cannot_work_is_refused():
    callback = LocalStepsCallback(steps=2)
    with raises(ConfigError, "there are no figures before training"):
        callback.compression_stats()
    with raises(ConfigError, "there is nothing to gather before training"):
        callback.consolidate()
    with raises(ConfigError, "there is nothing to save before training"):
        callback.save("unused")
    with raises(ConfigError, "exchanges something in each step"):
        fit(compiled(keras, DistributedOptimizer(keras.optimizers.SGD(0.1))), [callback])
    for api in APIS:
        with raises(ConfigError, "steps_per_execution=3"):
            fit(compiled(api, steps_per_execution=3), [callback])
        with raises(ConfigError, "use_ema"):
            fit(compiled(api, api.optimizers.SGD(0.1, use_ema=True)), [callback])
    fit(compiled(keras), [callback])
    with raises(ConfigError, "has trained another model"):
        fit(compiled(keras), [callback])
    with mock.patch.dict(os.environ, HOROVOD_ELASTIC="1"), raises(ConfigError, "elastic Horovod changes the ranks"):
        fit(compiled(keras), [LocalStepsCallback(steps=2)])
    with raises(ConfigError, "buffers='some'"):
        LocalStepsCallback(buffers="some")
    with raises(TypeError, "unknown option 'weights'"):
        LocalStepsCallback(weights="samples")
    with raises(ConfigError, "all ranks must make their rounds from the same model with the same options"):
        fit(compiled(keras), [LocalStepsCallback(steps=2 + hvd.rank())])


@check
def what_has_changed_since_the_last_fit_is_refused():
    for api in APIS:
        net, callback = compiled(api), LocalStepsCallback("fedavg", steps=2)
        fit(net, [callback], data(steps=1))
        net.compile(api.optimizers.SGD(0.1), "mse", steps_per_execution=3)
        with raises(ConfigError, "steps_per_execution=3"):
            fit(net, [callback])
        net.get_layer("hidden").trainable = False
        net.compile(api.optimizers.SGD(0.1), "mse")
        with raises(ConfigError, "other layers are trainable"):
            fit(net, [callback])
        net.get_layer("hidden").trainable = True
        net.compile(api.optimizers.SGD(0.1), "mse")
        fit(net, [callback], data(steps=1))
        if hvd.rank() == 1:
            net.set_weights(compiled(api, seed=4).get_weights())
        with raises(ConfigError, "weights are not those that the ranks share"):
            fit(net, [callback])


@check
def weights_that_another_callback_restores_are_taken_over_or_refused():
    for api in APIS:
        restored = compiled(api, seed=4).get_weights()

        class Restore(api.callbacks.Callback):
            def on_train_begin(self, logs=None, weights=restored):
                self.model.set_weights(weights)

        net, other = compiled(api), compiled(api, seed=4)
        fit(net, [Restore(), LocalStepsCallback("sparseloco", steps=2)])
        fit(other, [LocalStepsCallback("sparseloco", steps=2)])
        assert (flat(net) == flat(other)).all()
        with raises(ConfigError, "list it behind callbacks that restore weights"):
            fit(compiled(api), [LocalStepsCallback("sparseloco", steps=2), Restore()])


@check
def a_rank_that_lies_does_not_move_a_robust_mean():
    class Liar(keras.callbacks.Callback):
        """Called before the round ends."""

        def on_train_batch_end(self, batch, logs=None):
            if hvd.rank() == hvd.size() - 1:
                self.model.set_weights([1e6 * value for value in self.model.get_weights()])

    net = compiled(keras)
    fit(net, [Liar(), LocalStepsCallback("fedavg", steps=2, mean=Median())])
    same_on_all_ranks(net)
    assert (np.abs(flat(net)).max() < 10) == (hvd.size() > 2), "of two ranks, nobody knows who lies"
    with raises(ConfigError, "is sent sparsely"):
        fit(compiled(keras), [LocalStepsCallback(mean=Median())])

"""Callbacks for model.fit with several ranks, of Keras 3 and of tf_keras: the same objects work in both.

    model.fit(..., callbacks=[BroadcastGlobalVariablesCallback(0), MetricAverageCallback(), CompressionStatsCallback()])

Names and arguments are those of horovod.tensorflow.keras.callbacks. A callback has to be made on all ranks, and in the same
order among the others: eager collectives are paired by their order.
"""

import contextlib
import functools
import sys
import zlib
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext import ConfigError, ExchangeError

from . import saved_state

_CHUNK_BYTES = 64 * 2**20
# What tf.summary.scalar writes too; that one needs the package tensorboard.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class="DATA_CLASS_SCALAR"
)


def broadcast_variables(variables, root_rank=0, process_set=hvd.global_process_set) -> None:
    """Assign the values on root_rank to the variables on all ranks, eagerly. Takes tf.Variables and Keras 3's, of any dtype;
    one collective for every 64 MiB. All ranks give the same variables in the same order.

    Raises ConfigError inside tf.function, ExchangeError if ranks give variables of other shapes or dtypes.
    """
    if not tf.executing_eagerly():
        raise ConfigError("broadcast_variables inside tf.function: call it outside")
    if not process_set.included() or process_set.size() == 1:
        return
    variables = list(variables)
    form = str([(tuple(variable.shape), tf.as_dtype(variable.dtype).name) for variable in variables])
    forms = hvd.allgather(tf.constant([zlib.crc32(form.encode())], tf.int64), process_set=process_set).numpy()
    if (forms != forms[0]).any():
        raise ExchangeError("broadcast_variables: ranks give variables of other shapes or dtypes")
    at = 0
    while at < len(variables):
        chunk, size = [], 0
        while at < len(variables) and (not chunk or size < _CHUNK_BYTES):
            chunk.append((variables[at], np.asarray(variables[at].numpy())))
            size += chunk[-1][1].nbytes
            at += 1
        sent = np.concatenate([value.reshape(-1).view(np.uint8) for _, value in chunk])
        received = hvd.broadcast(tf.constant(sent), root_rank, process_set=process_set).numpy()
        start = 0
        for variable, value in chunk:
            part = received[start : start + value.nbytes].copy()  # starts where values of its type may start
            variable.assign(part.view(value.dtype).reshape(value.shape))
            start += value.nbytes


class _Callback:
    """Instances are also of the Callback classes of tf.keras and of each Keras that is imported when they are made."""

    model = None

    def __new__(cls, *args, **kwargs):
        return object.__new__(_with_bases(cls, tuple(_callback_classes())))

    def __init__(self):
        for base in _callback_classes():
            base.__init__(self)

    def set_model(self, model):
        self.model = model


def _callback_classes() -> list[type]:
    imported = [sys.modules[name].callbacks.Callback for name in ("tf_keras", "keras") if name in sys.modules]
    return list(dict.fromkeys([tf.keras.callbacks.Callback, *imported]))


@functools.cache
def _with_bases(cls, bases) -> type:
    missing = tuple(base for base in bases if not issubclass(cls, base))
    return type(cls.__name__, (cls, *missing), {"__module__": cls.__module__, "__doc__": cls.__doc__})


class BroadcastGlobalVariablesCallback(_Callback):
    """Gives all ranks the weights of the model and the variables of the optimizer that root_rank has: before the first
    batch, or after it where a rank's model has no weights before. The states of random generators (dropout) stay each
    rank's own.

    local_variables: variables that are left alone.
    """

    def __init__(self, root_rank=0, device="", local_variables=None, *, process_set=hvd.global_process_set):
        super().__init__()
        _check_device(device)
        self._root_rank, self._process_set = root_rank, process_set
        self._local: list[int] = []
        if local_variables is not None:
            for variable in [local_variables] if hasattr(local_variables, "assign") else local_variables:
                self.register_local_var(variable)
        self._done = False

    def register_local_var(self, var):
        self._local.append(id(_native(var)))

    def on_train_begin(self, logs=None):
        if self._done or not self._process_set.included() or self._process_set.size() == 1:
            return
        ready = int(bool(self.model.built and self.model.trainable_variables))
        if hvd.allgather(tf.constant([ready]), process_set=self._process_set).numpy().all():
            self._broadcast()

    def on_train_batch_end(self, batch, logs=None):
        if not self._done:
            self._broadcast()

    def _broadcast(self):
        self._done = True
        optimizer = self.model.optimizer
        _build(optimizer, self.model.trainable_variables)
        known = [*self.model.weights, *_variables(optimizer)]
        broadcast_variables(
            [variable for variable in known if id(_native(variable)) not in self._local], self._root_rank, self._process_set
        )


class MetricAverageCallback(_Callback):
    """Averages the metrics of an epoch over ranks, in one collective. Later callbacks (checkpoints, early stopping) see the
    averages, so it comes before them; so does the history.

    Raises ExchangeError if ranks have other metrics.
    """

    def __init__(self, device="", *, process_set=hvd.global_process_set):
        super().__init__()
        _check_device(device)
        self._process_set = process_set

    def on_epoch_end(self, epoch, logs=None):
        if not logs or not self._process_set.included() or self._process_set.size() == 1:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        # With the names' checksum in front, one collective tells whether ranks speak of the same metrics.
        row = np.array([zlib.crc32("\n".join(names).encode()), *(logs[name] for name in names)], np.float64)
        rows = hvd.allgather(tf.constant(row), process_set=self._process_set).numpy()
        size = self._process_set.size()
        if rows.size != size * row.size or (rows[:: row.size] != row[0]).any():
            raise ExchangeError(f"MetricAverageCallback: ranks have other metrics than this one: {', '.join(names)}")
        averages = rows.reshape(size, -1).mean(0)[1:]
        logs.update(zip(names, averages.tolist(), strict=True))


class LearningRateScheduleCallback(_Callback):
    """Multiplies a learning rate over epochs start_epoch to end_epoch (not included; None: for ever).

    initial_lr: the rate that is multiplied. multiplier: a function of the epoch, or a number m that means m ** (epoch -
    start_epoch). staircase: change at the start of an epoch, else at every batch, for a fraction of an epoch.
    momentum_correction: when the rate changes, scale the optimizer's momentum with it (Goyal et al., 2017, remark 2), for
    optimizers with a `momentum`. steps_per_epoch: batches in an epoch, if Keras does not know it.

    Logs the learning rate as `lr`. Raises ConfigError for an optimizer with a learning-rate schedule of its own.
    """

    def __init__(
        self,
        initial_lr,
        multiplier,
        start_epoch=0,
        end_epoch=None,
        staircase=True,
        momentum_correction=True,
        steps_per_epoch=None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr is required")
        self._initial_lr = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._start_epoch, self._end_epoch, self._staircase = start_epoch, end_epoch, staircase
        self._momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs=None):
        if not self._staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"{type(self).__name__}: Keras does not know the number of batches in an epoch; give steps_per_epoch"
                )

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self._epoch < self._start_epoch or (self._end_epoch is not None and self._epoch >= self._end_epoch):
            return
        if not self._staircase:
            self._set(self._initial_lr * self._multiplier(self._epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set(self._initial_lr * self._multiplier(self._epoch))

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["lr"] = self._get()

    def _get(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))

    def _set(self, rate: float) -> None:
        try:
            before = self._get()
            self.model.optimizer.learning_rate = rate
        except TypeError as error:
            raise ConfigError(f"{type(self).__name__}: the optimizer has a learning-rate schedule of its own") from error
        if self._momentum_correction and before > 0 and rate != before:
            for slot in _momenta(self.model):
                slot.assign(slot * tf.cast(rate / before, slot.dtype))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / ranks to initial_lr over warmup_epochs, a bit at every batch (Goyal et al.,
    2017). initial_lr: the rate for the whole job, usually that for one rank times the number of ranks."""

    def __init__(self, initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0):
        def multiplier(epoch):
            epoch += 1 / self.steps_per_epoch  # the last batch has the whole rate
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch == self._end_epoch - 1 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._get():g}.")


class CompressionStatsCallback(_Callback):
    """Adds to the logs, and so to the progress bar, the compression ratio and the megabytes that this rank hands to
    collectives per step: `compression_ratio` and `wire_mb`. With one rank there is nothing to add.

    log_dir: there rank 0 writes both as TensorBoard scalars after every epoch, with the optimizer's iterations as steps; and
    the seconds per step of every stage.
    """

    def __init__(self, log_dir=None):
        super().__init__()
        self._log_dir = log_dir
        self._writer = None

    def on_train_batch_end(self, batch, logs=None):
        self._add(logs)

    def on_epoch_end(self, epoch, logs=None):
        stats = self._add(logs)
        if stats is None or not self._log_dir or hvd.rank() != 0:
            return
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(str(self._log_dir))
        scalars = {
            "ratio": stats["ratio"],
            "wire_mb_per_step": stats["bytes_out"] / 1e6 / stats["steps"],
            **{f"seconds_per_step/{stage}": seconds / stats["steps"] for stage, seconds in stats["seconds"].items()},
        }
        with self._writer.as_default(int(self.model.optimizer.iterations)):
            for name, value in scalars.items():
                tf.summary.write(f"compression/{name}", tf.constant(value, tf.float32), metadata=_SCALAR)
        self._writer.flush()

    def _add(self, logs) -> dict | None:
        stats = _stats(self.model.optimizer)
        if not stats["steps"]:
            return None
        if logs is not None:
            logs["compression_ratio"] = stats["last_step"]["ratio"]
            logs["wire_mb"] = stats["last_step"]["bytes_out"] / 1e6
        return stats


class CompressionStateCallback(_Callback):
    """Saves what the optimizer's compression keeps on each rank (Keras' checkpoints hold none of it), and brings it back
    when a model is fitted that was restored from a checkpoint, so that training goes on as if it had never stopped.

    A file belongs to a number of the optimizer's iterations, folder/ITERATIONS/rankR.npz, and so to the Keras checkpoint of
    that moment, whoever writes it: BackupAndRestore, ModelCheckpoint, model.save. When `fit` starts, the file of the
    iterations that the optimizer then has is loaded; if there is none, everything stays as it is. All ranks use this
    callback; list it before the one that saves the model.

    folder: one that all ranks see if their number may change, else each host may have its own.
    save_freq: "epoch", or every so many iterations, as in the callback that saves the model.
    keep: how many saves stay; None: all.
    on_resize: see DistributedOptimizer's load_compression_state.
    """

    def __init__(self, folder, save_freq="epoch", keep=2, on_resize=None, *, process_set=hvd.global_process_set):
        super().__init__()
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ConfigError(f"save_freq={save_freq!r}; allowed: 'epoch' and numbers from 1")
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep}; allowed: from 1, and None")
        self._folder, self._save_freq, self._keep = Path(folder), save_freq, keep
        self._on_resize, self._process_set = on_resize, process_set
        self._is_restored, self._saved = False, 0

    def on_train_begin(self, logs=None):
        self._is_restored = False

    def on_epoch_begin(self, epoch, logs=None):
        # Not before: other callbacks restore the model and broadcast its variables when training begins.
        if not self._is_restored and self._takes_part():
            self._restore()
        self._is_restored = True

    def on_train_batch_end(self, batch, logs=None):
        if self._save_freq != "epoch" and self._iterations() // self._save_freq > self._saved // self._save_freq:
            self._save()

    def on_epoch_end(self, epoch, logs=None):
        if self._save_freq == "epoch":
            self._save()

    def _takes_part(self) -> bool:
        return self._process_set.included() and self._process_set.size() > 1

    def _iterations(self) -> int:
        return int(np.asarray(self.model.optimizer.iterations))

    def _restore(self):
        # Ranks may get the model from rank 0 only after the first batch.
        iterations = hvd.allgather(tf.constant([self._iterations()], tf.int64), process_set=self._process_set)
        self._saved = int(iterations.numpy().max())
        states = self._states()
        if hvd.allgather(tf.constant([len(states)]), process_set=self._process_set).numpy().any():
            _wrapped(self.model.optimizer).load_compression_state(states or None, self._on_resize)

    def _states(self) -> list[dict]:
        """This rank's, or those of all ranks if there were more or fewer."""
        folder, rank = self._folder / str(self._saved), self._process_set.rank()
        own = saved_state.read(folder / f"rank{rank}.npz") if (folder / f"rank{rank}.npz").exists() else None
        if own is not None and own["ranks"] == self._process_set.size():
            return [own]
        states = [saved_state.read(path) for path in sorted(folder.glob("rank*.npz"))]
        return [state for state in states if state["ranks"] == states[0]["ranks"]]

    def _save(self):
        if not self._takes_part():
            return
        self._saved = self._iterations()
        name = f"rank{self._process_set.rank()}.npz"
        saved_state.write(self._folder / str(self._saved) / name, _wrapped(self.model.optimizer).compression_state())
        saves = sorted(
            (path for path in self._folder.glob(f"*/{name}") if path.parent.name.isdigit()),
            key=lambda path: path.stat().st_mtime_ns,
        )
        for old in saves[: -self._keep] if self._keep else ():
            old.unlink()
            with contextlib.suppress(OSError):  # other ranks' are in there
                old.parent.rmdir()


def _stats(optimizer) -> dict:
    return _wrapped(optimizer).compression_stats()


def _wrapped(optimizer):
    """The one that DistributedOptimizer wrapped. Raises ConfigError if there is none."""
    for wrapped in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if hasattr(wrapped, "compression_stats"):
            return wrapped
    raise ConfigError("the model is not compiled with a DistributedOptimizer")


def _check_device(device: str) -> None:
    if device:
        raise ConfigError("device: the values pass through the host; only '' is allowed")


def _native(variable) -> tf.Variable:
    """The tf.Variable in a variable of Keras 3."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def _variables(optimizer) -> list:
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def _build(optimizer, variables) -> None:
    """Make the optimizer's variables, as its first step would."""
    if not hasattr(optimizer, "build"):
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", False):  # in tf_keras building again does nothing
        optimizer.build(variables)


def _momenta(model) -> list[tf.Variable]:
    """The momentum variables of an optimizer that has a momentum."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if not hasattr(optimizer, "momentum"):
        return []
    if hasattr(optimizer, "get_slot"):
        slots = [slots.get("momentum") for slots in optimizer._slots.values()]
    else:
        slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [_native(slot) for slot in slots if slot is not None]

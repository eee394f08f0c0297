"""Callbacks for model.fit with several ranks, of Keras 3 and of tf_keras: the same objects work in both.

    model.fit(..., callbacks=[BroadcastGlobalVariablesCallback(0), MetricAverageCallback(), CompressionStatsCallback()])

Names and arguments are those of horovod.tensorflow.keras.callbacks. A callback has to be made on all ranks, and in the same
order among the others: eager collectives are paired by their order.
"""

import contextlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext import ConfigError, ExchangeError

from . import saved_state
from .eager import broadcast_variables, gather, has_others
from .keras_callback import Callback, native_variable

# What tf.summary.scalar writes too; that one needs the package tensorboard.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class="DATA_CLASS_SCALAR"
)


class BroadcastGlobalVariablesCallback(Callback):
    """Gives all ranks the weights of the model and the variables of the optimizer that root_rank has.

    It does so before the first batch, or after it where a rank's model has no weights before. The states of random
    generators (dropout) stay each rank's own.

    Args:
        root_rank: The rank, in the whole job, whose values count.
        device: Only "" is allowed, because the values pass through the host.
        local_variables: Variables that are left alone.
        process_set: The ranks that take part.

    Raises:
        ConfigError: A device is given.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        *,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ):
        super().__init__()
        _check_device(device)
        self._root_rank, self._process_set = root_rank, process_set
        self._local: list[int] = []
        if local_variables is not None:
            for variable in [local_variables] if hasattr(local_variables, "assign") else local_variables:
                self.register_local_var(variable)
        self._done = False

    def register_local_var(self, var: Any) -> None:
        """Leave a variable alone.

        Args:
            var: The variable.
        """
        self._local.append(id(native_variable(var)))

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self._done or not has_others(self._process_set):
            return
        ready = int(bool(self.model.built and self.model.trainable_variables))
        if gather([ready], self._process_set).all():
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        optimizer = self.model.optimizer
        _build(optimizer, self.model.trainable_variables)
        known = [*self.model.weights, *_variables(optimizer)]
        broadcast_variables(
            [variable for variable in known if id(native_variable(variable)) not in self._local],
            self._root_rank,
            self._process_set,
        )


class MetricAverageCallback(Callback):
    """Averages the metrics of an epoch over ranks, in one collective.

    List it before callbacks that are to see the averages (checkpoints, early stopping). The history gets the averages, too.

    Args:
        device: Only "" is allowed, because the values pass through the host.
        process_set: The ranks that take part.

    Raises:
        ConfigError: A device is given.
        ExchangeError: Ranks have different metrics; raised at the end of an epoch.
    """

    def __init__(self, device: str = "", *, process_set: hvd.ProcessSet = hvd.global_process_set):
        super().__init__()
        _check_device(device)
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if not logs or not has_others(self._process_set):
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        # With the names' checksum in front, one collective tells whether ranks speak of the same metrics.
        row = np.array([zlib.crc32("\n".join(names).encode()), *(logs[name] for name in names)], np.float64)
        rows = gather(row, self._process_set)
        size = self._process_set.size()
        if rows.size != size * row.size or (rows[:: row.size] != row[0]).any():
            raise ExchangeError(f"MetricAverageCallback: ranks have other metrics than this one: {', '.join(names)}")
        averages = rows.reshape(size, -1).mean(0)[1:]
        logs.update(zip(names, averages.tolist(), strict=True))


class CompressionStatsCallback(Callback):
    """Adds `compression_ratio`, and `wire_mb`, the megabytes that this rank hands to collectives per step, to the logs.

    The progress bar shows them, too. With one rank there is nothing to add.

    Args:
        log_dir: The folder in which rank 0 writes both as TensorBoard scalars after every epoch, with the optimizer's
            iterations as steps, and the seconds per step of every stage; None for none.
    """

    def __init__(self, log_dir: str | os.PathLike | None = None):
        super().__init__()
        self._log_dir = log_dir
        self._writer: Any = None

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
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

    def _add(self, logs: dict | None) -> dict | None:
        stats = _wrapped(self.model.optimizer).compression_stats()
        if not stats["steps"]:
            return None
        if logs is not None:
            logs["compression_ratio"] = stats["last_step"]["ratio"]
            logs["wire_mb"] = stats["last_step"]["bytes_out"] / 1e6
        return stats


class CompressionStateCallback(Callback):
    """Saves what the optimizer's compression keeps on each rank, and loads it when training goes on from a checkpoint.

    Keras' checkpoints hold none of it. With it, training goes on as if it had never stopped.

    A file belongs to a number of the optimizer's iterations, folder/ITERATIONS/rankR.npz, and so to the Keras checkpoint of
    that moment, whoever writes it: BackupAndRestore, ModelCheckpoint, model.save. When `fit` starts, the file of the
    iterations that the optimizer then has is loaded; if there is none, everything stays as it is. All ranks use this
    callback; list it before the one that saves the model.

    Args:
        folder: A folder that all ranks see if their number may change, otherwise each host may have its own.
        save_freq: "epoch", or a number of iterations, as in the callback that saves the model.
        keep: How many saves stay; None for all.
        on_resize: See load_compression_state of a wrapped optimizer.
        process_set: The ranks that take part.

    Raises:
        ConfigError: save_freq or keep is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        save_freq: Literal["epoch"] | int = "epoch",
        keep: int | None = 2,
        on_resize: str | None = None,
        *,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ):
        super().__init__()
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ConfigError(f"save_freq={save_freq!r}; allowed: 'epoch' and numbers from 1")
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep}; allowed: from 1, and None")
        self._folder, self._save_freq, self._keep = Path(folder), save_freq, keep
        self._on_resize, self._process_set = on_resize, process_set
        self._is_restored, self._saved = False, 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._is_restored = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        # Not earlier: other callbacks restore the model and broadcast its variables when training begins.
        if not self._is_restored and has_others(self._process_set):
            self._restore()
        self._is_restored = True

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._save_freq != "epoch" and self._iterations() // self._save_freq > self._saved // self._save_freq:
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._save_freq == "epoch":
            self._save()

    def _iterations(self) -> int:
        return int(np.asarray(self.model.optimizer.iterations))

    def _restore(self) -> None:
        # Ranks may get the model from rank 0 only after the first batch.
        self._saved = int(gather([self._iterations()], self._process_set, tf.int64).max())
        states = self._states()
        if gather([len(states)], self._process_set).any():
            _wrapped(self.model.optimizer).load_compression_state(states or None, self._on_resize)

    def _states(self) -> list[dict]:
        """This rank's, or those of all ranks if there were more or fewer."""
        folder, rank = self._folder / str(self._saved), self._process_set.rank()
        own = saved_state.read(folder / f"rank{rank}.npz") if (folder / f"rank{rank}.npz").exists() else None
        if own is not None and own["ranks"] == self._process_set.size():
            return [own]
        states = [saved_state.read(path) for path in sorted(folder.glob("rank*.npz"))]
        return [state for state in states if state["ranks"] == states[0]["ranks"]]

    def _save(self) -> None:
        if not has_others(self._process_set):
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


def _wrapped(optimizer: Any) -> Any:
    """The one that DistributedOptimizer wrapped. Raises ConfigError if there is none."""
    for wrapped in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if hasattr(wrapped, "compression_stats"):
            return wrapped
    raise ConfigError("the model is not compiled with a DistributedOptimizer")


def _check_device(device: str) -> None:
    if device:
        raise ConfigError("device: the values pass through the host; only '' is allowed")


def _variables(optimizer: Any) -> list:
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def _build(optimizer: Any, variables: Iterable) -> None:
    """Make the optimizer's variables, as its first step would."""
    if not hasattr(optimizer, "build"):
        optimizer._create_all_weights(variables)  # legacy ones have no public name for it
    elif not getattr(optimizer, "built", False):  # in tf_keras building again does nothing
        optimizer.build(variables)

"""Learning rates that change over epochs: callbacks for model.fit."""

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext import ConfigError

from .keras_callback import Callback, native_variable


class LearningRateScheduleCallback(Callback):
    """Multiplies a learning rate over epochs start_epoch to end_epoch (not included; None: for ever).

    It logs the learning rate as `lr`.

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: A function of the epoch, or a number m that means m ** (epoch - start_epoch).
        start_epoch: The first of these epochs.
        end_epoch: The epoch after the last of them.
        staircase: Change at the start of an epoch; otherwise at every batch, for a fraction of an epoch.
        momentum_correction: When the rate changes, scale the optimizer's momentum with it (Goyal et al., 2017, remark 2), for
            optimizers with a `momentum`.
        steps_per_epoch: Batches in an epoch, if Keras does not know it.

    Raises:
        ConfigError: initial_lr is None; or, in training, the optimizer has a learning-rate schedule of its own.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr is required")
        self._initial_lr = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._start_epoch, self._end_epoch, self._staircase = start_epoch, end_epoch, staircase
        self._momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not self._staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"{type(self).__name__}: Keras does not know the number of batches in an epoch; give steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if self._epoch < self._start_epoch or (self._end_epoch is not None and self._epoch >= self._end_epoch):
            return
        if batch == 0 or not self._staircase:
            part = 0 if self._staircase else batch / self.steps_per_epoch
            self._set(self._initial_lr * self._multiplier(self._epoch + part))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
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
    """Raises the learning rate from initial_lr / ranks to initial_lr, a bit at every batch (Goyal et al., 2017).

    Args:
        initial_lr: The rate for the whole job, usually that for one rank times the number of ranks.
        warmup_epochs: The number of epochs that this takes.
        momentum_correction: See LearningRateScheduleCallback.
        steps_per_epoch: See LearningRateScheduleCallback.
        verbose: 1 to print a line at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            epoch += 1 / self.steps_per_epoch  # the last batch has the whole rate
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch == self._end_epoch - 1 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._get():g}.")


def _momenta(model: Any) -> list[tf.Variable]:
    """The momentum variables of an optimizer that has a momentum."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if not hasattr(optimizer, "momentum"):
        return []
    if hasattr(optimizer, "get_slot"):
        slots = [slots.get("momentum") for slots in optimizer._slots.values()]  # get_slot alone would not list them
    else:
        slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [native_variable(slot) for slot in slots if slot is not None]

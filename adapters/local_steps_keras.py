"""Training with local steps for Keras, over Horovod: DiLoCo, SparseLoCo, FedAvg and their like, by a callback.

model.compile(optimizer, loss)                            # the plain optimizer
model.fit(data, callbacks=[LocalStepsCallback(steps=30)])
"""

import os
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from grace_ext import ConfigError
from grace_ext._util.files import atomic_write
from grace_ext.means import Mean
from grace_ext.outer import OuterOptimizer
from grace_ext.pipeline.compressor import Compressor
from grace_ext.rounds import Rounds
from grace_ext.rounds.fragments import Fragments
from grace_ext.rounds.timing import MOVES

from ._common import state_files
from ._common.local_rounds import RoundSettings, build_rounds, consolidate
from ._common.options import CompressionOptions
from ._horovod.local_rounds import ranks_of
from ._tensorflow.eager import broadcast_variables, gather
from ._tensorflow.keras_callback import Callback
from ._tensorflow.keras_mixins import is_wrapped
from ._tensorflow.model_parameters import ModelParameters
from ._tensorflow.transport import EagerTransport

__all__ = ["CompressionOptions", "LocalStepsCallback"]


class LocalStepsCallback(Callback):
    """Makes rounds of local steps out of `fit`, for Keras 3 and tf_keras.

    When training begins, all ranks get the weights of rank 0. At its end, and at the end of each further `fit` with the same
    callback, all ranks' variables have the same bits; ranks with fewer batches wait for the others. Each rank keeps its
    optimizer's state to itself. Validation within `fit` is of what the ranks share.

    Args:
        preset: See LocalSteps of grace_ext.adapters.local_steps, and so with all of the following.
        steps: Number of batches in a round, or a function of the number of the round, or "auto".
        seconds: The time of a round, in the place of `steps`.
        compression: The spec of pseudo-gradients; None: that of the preset.
        memory: Its error feedback; None: that of the preset.
        outer: The outer optimizer; None: that of the preset.
        fragments: In how many fragments the model is exchanged, or name patterns for each fragment.
        delay: Number of batches during which an exchange goes on in the background.
        keep: What of its own a variable keeps when what was exchanged is applied after a delay; see `LocalSteps`.
        mean: A mean of grace_ext.means; None: that of the preset.
        buffers: "average" or "local": what becomes of floating-point weights that are not trainable.
        process_set: The ranks; None for all.
        **options: All others of CompressionOptions but groups, selection and grad_scaler. A schedule's steps are rounds.

    Raises:
        ConfigError: Arguments do not fit together. When training begins: ranks differ, the model's optimizer exchanges something
            itself or has `use_ema`, or `steps_per_execution` is not 1. When a further `fit` begins: other layers are trainable
            than before, or the weights are not those with which the last one ended.
        TypeError: An option is unknown.
    """

    def __init__(
        self,
        preset: str = "sparseloco",
        *,
        steps: int | str | Callable[[int], int] | None = None,
        seconds: float | None = None,
        compression: str | dict | Compressor | None = None,
        memory: str | dict | None = None,
        outer: str | OuterOptimizer | None = None,
        fragments: Fragments = 1,
        delay: int = 0,
        keep: float | str = MOVES,
        mean: Mean | None = None,
        buffers: str = "average",
        process_set: Any = None,
        **options: Any,
    ):
        super().__init__()
        self._settings = RoundSettings(preset, steps, seconds, outer, fragments, delay, keep, buffers, mean=mean)
        self._options = self._settings.options(compression, memory, options)
        self._process_set = process_set
        self._rounds: Rounds | None = None
        self._trained: Any = None  # the model
        self._saved: dict | None = None  # what was loaded before training
        self._own: list | None = None  # this rank's variables, during a validation
        self._is_amid = False  # a round: variables may be others than those that the ranks share
        self._has_begun = False  # this `fit`

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._has_begun = False
        self._check_compiled()
        if self._rounds is None:
            self._begin()
        elif self._trained is not self.model:
            raise ConfigError("this LocalStepsCallback has trained another model: make one for each model")
        else:
            self._parameters.check()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._check_weights()

    def _check_weights(self) -> None:
        """A collective. Not earlier: other callbacks restore the model when training begins."""
        if not (self._has_begun or self._is_amid):
            own = all(self._parameters.are(fragment.shared) for fragment in self._rounds.fragments)  # type: ignore[union-attr]
            if not gather([own], self._ranks).all():
                raise ConfigError(
                    "weights are not those that the ranks share: set_weights, load_weights or a callback such as BackupAndRestore "
                    "has changed them, on this rank or another one. Make a new LocalStepsCallback then, and list it behind callbacks "
                    "that restore weights when training begins"
                )
        self._has_begun = True

    def _check_compiled(self) -> None:
        optimizer = self.model.optimizer
        if is_wrapped(optimizer) or hasattr(optimizer, "_allreduce"):  # ours or Horovod's
            raise ConfigError(
                f"{type(optimizer).__name__} exchanges something in each step: compile with the plain optimizer"
            )
        if getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", False):
            raise ConfigError(
                f"use_ema of {type(optimizer).__name__}: its averages are each rank's own, and Keras puts them in the place of what "
                "the ranks share; allowed with local steps: use_ema=False"
            )
        model: Any = self.model
        # An int in Keras 3, a variable in tf_keras.
        per_execution: Any = (
            model.steps_per_execution if hasattr(model, "steps_per_execution") else model._steps_per_execution
        )
        if int(per_execution) != 1:
            raise ConfigError(f"steps_per_execution={int(per_execution)}; allowed with local steps: 1")

    def _begin(self) -> None:
        process_set, prefix = ranks_of(hvd, self._process_set)
        transport = EagerTransport(process_set)
        parameters = ModelParameters(self.model, self._settings.buffers == "average")
        rounds, self._worker = build_rounds(
            self._settings, self._options, transport, prefix, parameters, state_files.gather_memories
        )
        weights = self.model.weights
        layout = [(tuple(variable.shape), tf.as_dtype(variable.dtype).name) for variable in weights]
        rounds.connect((layout, self._settings.buffers))
        broadcast_variables(self.model.non_trainable_weights, process_set.ranks[0], process_set)
        if self._saved is not None:
            rounds.load_state_dict(self._saved)
            self._saved = None
        self._rounds, self._parameters, self._trained, self._ranks = rounds, parameters, self.model, process_set

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._is_amid = True
        self._rounds.step()  # type: ignore[union-attr]  # training has begun

    def on_train_end(self, logs: dict | None = None) -> None:
        self._check_weights()  # where there was no epoch left
        self._rounds.join()  # type: ignore[union-attr]
        self._is_amid = False

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Of a validation within `fit`, too, whose end is in the middle of a round."""
        if self._rounds is not None:
            self._own = self._parameters.copy()
            self._rounds.show_shared()

    def on_test_end(self, logs: dict | None = None) -> None:
        if self._own is not None:
            self._parameters.restore(self._own)
            self._own = None

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage: see LocalSteps.compression_stats.

        Returns:
            The figures.

        Raises:
            ConfigError: Training has not begun.
        """
        if self._rounds is None:
            raise ConfigError("there are no figures before training")
        return self._rounds.stats()

    def save(self, path: str | os.PathLike) -> None:
        """Write this rank's state to a file, between two calls of `fit` or in a callback after this one. No collective.

        Args:
            path: The file, one for each rank. Weights and the optimizer's state are saved beside it, as by model.save.

        Raises:
            ConfigError: Training has not begun.
        """
        if self._rounds is None:
            raise ConfigError("there is nothing to save before training")
        with atomic_write(path) as part, open(part, "wb") as file:
            state_files.write(file, self._rounds.state_dict())

    def consolidate(self, to: int = 0) -> None:
        """Gather the memories of all ranks for `save` on one, until the next round: a collective, between two calls of `fit`.

        Args:
            to: The rank that will save them.

        Raises:
            ConfigError: Training has not begun, or there is no such rank.
        """
        if self._rounds is None:
            raise ConfigError("there is nothing to gather before training")
        consolidate(self._rounds, self._worker, to)

    def load(self, path: str | os.PathLike) -> None:
        """Go on from a saved state, on all ranks, each from its own file: bit for bit, with the same weights and optimizer.

        Or all from one that has the memories of all ranks. With another number of ranks, `on_resize` decides.

        Args:
            path: The file.

        Raises:
            ConfigError: The state does not fit; before the first `fit`, that raises it.
        """
        state = state_files.read(path)
        state["turns"] = {int(number): turn for number, turn in state["turns"].items()}
        for turn in state["turns"].values():
            turn["fragment"]["exchange"] = state_files.with_numbered_ranks(turn["fragment"]["exchange"])
        self._is_amid = any(turn["steps"] or turn["under_way"] for turn in state["turns"].values())
        if self._rounds is None:
            self._saved = state
        else:
            self._rounds.load_state_dict(state)

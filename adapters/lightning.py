"""Compressed gradients for Lightning.

trainer = Trainer(accelerator="cpu", devices=2, strategy=CompressedDDPStrategy())
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from grace_ext import ConfigError
from grace_ext.exchange.checkpoint import KEY
from grace_ext.pipeline.compressor import Compressor

from ._common.versions import check_version
from ._torch.ddp_options import DdpOptions
from ._torch.rank_files import forget
from .torch_ddp import CompressionState

__all__ = ["CompressedDDPStrategy"]

_OURS = {field.name for field in dataclasses.fields(DdpOptions)} - {"chosen", "compression", *DdpOptions.absent} | {
    "backend"
}
#: Of DDPStrategy, what does not go with our hook.
_REFUSED = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "process_group")


class CompressedDDPStrategy(DDPStrategy):
    """DDPStrategy, with compressed gradients.

    The Trainer's arguments do what they do without it: accumulation, clipping, precision, automatic and manual optimization.
    The optimizers of configure_optimizers are known when training begins, so an AdamW gets the default for AdamW. Checkpoints
    have what all ranks remember, under the key "grace_ext", unless they are of weights only; `fit(ckpt_path=…)` goes on as if
    training had not been interrupted.

    Args:
        compression: See CompressionOptions.
        **options: All others of CompressionState, except named_parameters, optimizer and process_group; and those of
            DDPStrategy and DistributedDataParallel, such as find_unused_parameters. timeout goes to both, and grad_scaler is
            Lightning's own if none is given.

    Attributes:
        compression_state: The CompressionState of the model that is trained: compression_stats() has its bytes and seconds.
            None before training.

    Raises:
        ConfigError: Lightning is of a version that is not supported; there is another communication hook; or
            CompressionState raises it.
        TypeError: An option is unknown.
    """

    def __init__(self, compression: str | dict | Compressor | None = None, **options: Any):
        check_version("lightning")
        self._grace_options = {name: options.pop(name) for name in sorted(_OURS & options.keys())}
        self._grace_options["compression"] = compression
        for name in _REFUSED:
            if options.get(name) is not None:
                raise ConfigError(f"{name}={options[name]!r}: CompressedDDPStrategy has a hook of its own, among all ranks")
        known = {*inspect.signature(DDPStrategy).parameters, *inspect.signature(DistributedDataParallel).parameters}
        known -= {*_REFUSED, "kwargs", "module", "device_ids", "output_device"}
        unknown = sorted(options.keys() - known)
        if unknown:
            allowed = ", ".join(sorted(_OURS | known))
            raise TypeError(f"unknown option {', '.join(map(repr, unknown))}; allowed: compression, {allowed}")
        given = {name: value for name, value in self._grace_options.items() if name != "backend"}
        DdpOptions.from_keywords(given).check_parts()
        super().__init__(**options)
        self.compression_state: CompressionState | None = None

    def _register_ddp_hooks(self) -> None:
        # Lightning's own registers hooks on CUDA only. The optimizers are set up after this.
        if self.compression_state is not None:  # of an earlier fit()
            self.compression_state._release()
        options = {"grad_scaler": getattr(self.precision_plugin, "scaler", None), **self._grace_options}
        self.compression_state = CompressionState(timeout=self._timeout, **options)
        self.compression_state.register(self.model, lambda: self.optimizers)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        state = self.compression_state
        if state is not None and not state._is_empty and "optimizer_states" in checkpoint:
            state.consolidate_state_dict()
            if self.is_global_zero:
                checkpoint[KEY] = state.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.compression_state is None:
            return
        if KEY in checkpoint:
            self.compression_state.load_state_dict(checkpoint[KEY])
        else:
            forget(self.compression_state, self.global_rank)

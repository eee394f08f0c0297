"""The options of wrapped torch optimizers."""

import dataclasses

import horovod.torch as hvd

from .._horovod.options import HorovodOptions


@dataclasses.dataclass
class TorchOptions(HorovodOptions):
    """The options of a wrapped torch optimizer."""

    op: object = hvd.Average
    process_set: hvd.ProcessSet = hvd.global_process_set
    release_gradients: bool = False
    backend: str | None = None
    hvd = hvd

"""Horovod's distributed optimizer for PyTorch, with compressed gradients. No patch to Horovod.

optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

from grace_ext.pipeline.compressor import Compressor

from ._common.options import CompressionOptions
from ._torch.elastic import register
from ._torch.hvd_transport import HorovodTransport
from ._torch.wrapped_optimizer import TorchOptions, wrap

__all__ = ["CompressionOptions", "DistributedOptimizer", "HorovodTransport"]

register()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: str | dict | Compressor | type | None = None,
    backward_passes_per_step: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: list | int | None = None,
    sparse_as_dense: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    release_gradients: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Any:
    """Wrap a torch.optim.Optimizer so that gradients are compressed, exchanged and averaged before each step.

    A drop-in for hvd.DistributedOptimizer: the named arguments are Horovod's, in its order, the others those of
    CompressionOptions. The result is an instance of the given optimizer's class that shares its state and param_groups.
    Wrapping parameters once more detaches the optimizer that exchanged them before.

    Buckets follow the order in which the first backward pass on rank 0 produced the gradients; from the second step on, each
    is encoded and sent while backward goes on.

    With a torch.amp.GradScaler pass it as grad_scaler. Call synchronize() before scaler.unscale_(optimizer), and
    scaler.step(optimizer) in skip_synchronize(); or scaler.step(optimizer) alone, which does all of it.

    state_dict() has this rank's memory under "grace_ext", and those of all ranks after consolidate_state_dict().

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: model.named_parameters(). Names appear in rules and in state_dict(); without them, parameters are
            numbered. Of a parameter with several names, the first one counts.
        compression: See CompressionOptions.
        backward_passes_per_step: How many backward passes are accumulated before gradients are exchanged.
        op: hvd.Average or hvd.Sum.
        gradient_predivide_factor: With hvd.Average, gradients are divided by this before the sum, and by the rest of the
            number of ranks after it.
        num_groups: A number of equal groups; overrides `groups`.
        groups: See CompressionOptions.
        sparse_as_dense: Sparse gradients, as nn.Embedding(sparse=True) makes them, are made dense. Otherwise they are
            exchanged as rows and stay sparse, with each row once; where no rule says anything else, as "dense/lloyd:0.1" by
            default. On which parameters have such gradients the ranks agree in the first step: a table that has no gradient in
            it on any rank is exchanged as a dense one from then on, which the log "grace_ext" says.
        process_set: The ranks that exchange gradients.
        release_gradients: Take gradients out of p.grad when they are exchanged, and free their memory once they are encoded, so
            that error feedback by allgather needs one float32 copy of them less (docs/choosing.md). Until synchronize() or step()
            puts the result there, a stand-in is in p.grad, and reading or changing that raises ExchangeError.
        backend: What carries containers: "horovod" for MPI or Gloo, as Horovod was started; "gloo" for a group of PyTorch's Gloo
            beside Horovod, which between hosts with latency takes a fraction of the time (docs/cluster.md); "nccl" for Horovod's
            NCCL, through this rank's current GPU. None: "gloo" if one of Horovod's collectives takes 20 ms or more when the
            optimizer is wrapped, else "horovod"; and "horovod" with elastic Horovod. Alike on all ranks.
        **options: All others of CompressionOptions.

    Returns:
        The wrapped optimizer.

    Raises:
        ConfigError: Something cannot be honoured: op=Adasum, complex parameters, gradients that are sparse in another way
            than by rows without sparse_as_dense, an optimizer that Horovod has wrapped, specs that differ between ranks, a backend
            that Horovod was built without, or "gloo" with elastic Horovod.
        ExchangeError: With backend "gloo" some rank reaches none of the addresses of the first one.
        TypeError: An option is unknown.
    """
    named = TorchOptions.from_keywords(
        options,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        release_gradients=release_gradients,
        backend=backend,
    )
    return wrap(optimizer, named_parameters, named)

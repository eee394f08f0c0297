"""Training with local steps for PyTorch, over torch.distributed or Horovod: DiLoCo, SparseLoCo, FedAvg and their like.

Workers train by themselves, and only now and then exchange by how much their parameters have moved.

local = LocalSteps(model, optimizer, steps=30)  # before the loop
local.step()                                    # after each optimizer.step()
"""

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from grace_ext import ConfigError
from grace_ext.means import Mean
from grace_ext.memory import Memory
from grace_ext.outer import OuterOptimizer
from grace_ext.pipeline.compressor import Compressor
from grace_ext.rounds.fragments import Fragments
from grace_ext.rounds.timing import MOVES
from grace_ext.transport.base import Transport

from ._common.local_rounds import RoundSettings, consolidate
from ._common.options import CompressionOptions
from ._torch.ddp_transport import own_transport
from ._torch.module_parameters import ModuleParameters
from ._torch.round_member import Ranks, RoundMember
from ._torch.saved_state import to_numpy, to_torch

__all__ = ["CompressionOptions", "LocalSteps"]


class LocalSteps(RoundMember):
    """Makes rounds of local steps out of a training loop that exchanges nothing.

    Make it on all ranks, in the same order as others, when the model is where it is to be trained. It gives all ranks the
    parameters and buffers of rank 0. Which parameters require gradients is decided then. Each rank keeps its optimizer's state
    to itself. After each round without a delay, all ranks' parameters have the same bits.

    With elastic Horovod, make it before the function that hvd.elastic.run decorates, and give it to the state,
    hvd.elastic.TorchState(model=model, optimizer=optimizer, local=local). When the ranks change, all go on from what rank 0's last
    round gave, with rank 0's optimizer; memories follow `on_resize`.

    Args:
        model: The module, not in DistributedDataParallel. Where several ranks of a site share a model by DDP, give
            `ddp.module`, and as process_group the ranks of the same number in each site.
        optimizer: The optimizer of the local steps, or several. If a rank's parameters are not finite, they return to what the
            ranks share, and moments in here that are not finite are dropped.
        preset: Settings of a published method, for what is left open: "sparseloco", "diloco", "muloco" or "fedavg"; see
            grace_ext.rounds.presets.
        steps: Number of local steps in a round; or a function of the number of the round, from 1 on, that gives the same on
            all ranks; or "auto", or a grace_ext.rounds.AutoSteps: as many as make exchanges a tenth, or another share, of the
            time. None: that of the preset.
        seconds: In the place of `steps`: ranks make as many steps as fit into this time, so that slow ones make fewer.
        compression: The spec of pseudo-gradients, see CompressionOptions; None: that of the preset.
        memory: Its error feedback: "residual:decay=0.95", "ef21" or "none", or by name pattern, see CompressionOptions; None:
            that of the preset.
        outer: The outer optimizer: "sgd:1", "nesterov:lr=0.7:momentum=0.9", "adam:lr=0.01", "yogi:lr=0.01" (`python -m
            grace_ext codecs`); None: that of the preset.
        fragments: In how many fragments the model is exchanged, each at its own offset; or name patterns for each fragment.
        delay: Number of local steps during which an exchange goes on in the background, below steps / fragments.
        keep: What of its own a parameter keeps when what was exchanged is applied after a delay: "moves", what it has moved since
            the exchange began; or a share of its value. With error feedback and a sparse compression no share above 0, since the
            memory keeps the moves that are not sent.
        weights: "uniform", or "samples": ranks count by the samples that they gave to `step` since the last round.
        most_samples: With "samples": a rank that gave more in a round counts as if it had given so many; None for no cap.
        mean: WeightedMean() of grace_ext.means; SenderMean(), the mean of each element over the ranks that have sent it; or one that
            bears some ranks that lie or fail: Median(), TrimmedMean(0.25), ClippedMean() or NearestNeighborMixing(Median(), 0.25).
            With all but the weighted mean, all ranks get what each one sends, so that the communicator has to be "allgather". All
            but WeightedMean, SenderMean and ClippedMean need uniform weights, and a dense compression or memory "ef21". None: that
            of the preset, which is SenderMean() for "sparseloco" and WeightedMean() for all others.
        buffers: "average": floating-point buffers, such as the running means of BatchNorm, are averaged in each round, in
            float32 and uncompressed, by `mean`. "local": each rank keeps its own. Buffers of integers always stay
            each rank's own.
        process_group: The ranks, with torch.distributed; None for all.
        backend: With torch.distributed, see CompressionState of grace_ext.adapters.torch_ddp. With Horovod, None, "horovod" or "gloo",
            see DistributedOptimizer of grace_ext.adapters.horovod_torch.
        timeout: See CompressionState of grace_ext.adapters.torch_ddp.
        process_set: The ranks, with Horovod, which is used if this is given, or if only Horovod is initialized.
        **options: All others of CompressionOptions but groups, selection and grad_scaler. A schedule's steps are rounds.

    Raises:
        ConfigError: Arguments do not fit together, ranks differ, or neither library is initialized.
        TypeError: An option is unknown.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        preset: str = "sparseloco",
        *,
        steps: int | str | Callable[[int], int] | None = None,
        seconds: float | None = None,
        compression: str | dict | Compressor | None = None,
        memory: str | dict | Memory | None = None,
        outer: str | OuterOptimizer | None = None,
        fragments: Fragments = 1,
        delay: int = 0,
        keep: float | str = MOVES,
        weights: str = "uniform",
        most_samples: float | None = None,
        mean: Mean | None = None,
        buffers: str = "average",
        process_group: dist.ProcessGroup | None = None,
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
        process_set: Any = None,
        **options: Any,
    ):
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        _check(model, optimizers, preset)
        settings = RoundSettings(preset, steps, seconds, outer, fragments, delay, keep, buffers, weights, most_samples, mean)
        shared = settings.options(compression, memory, options)
        parameters = ModuleParameters(model, optimizers, buffers == "average")
        ranks, prefix = _ranks(process_group, backend, timeout, process_set)
        super().__init__(ranks, prefix, settings, shared, parameters)

    def step(self, samples: float = 1.0) -> bool:
        """Count a local step; call it on every rank after each of its optimizer's steps, also after one that was skipped.

        Args:
            samples: Number of samples of the step, which counts with weights="samples".

        Returns:
            Whether parameters have changed, because a round has ended.

        Raises:
            ConfigError: `samples` is negative or not finite, the ranks start from different checkpoints, or parameters of the model or
                of the optimizers are others than when LocalSteps was made.
            ExchangeError: An earlier exchange failed, or the ranks are in different rounds.
        """
        return self._current().step(samples)

    def synchronize(self) -> None:
        """End the round now: all ranks' parameters have the same bits afterwards. For evaluation and at the end of training.

        A collective: call it on all ranks after the same number of rounds. The next round begins here.
        """
        self._current().synchronize()

    def join(self) -> None:
        """Take part in the rounds of the other ranks until all have called it: for ranks with fewer steps than others.

        Means are over the ranks that still have data. All ranks' parameters have the same bits afterwards.
        """
        self._current().join()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the model's parameters are what the ranks share, as for an evaluation in the middle of a round.

        No collective, but it waits for an exchange under way. Buffers stay this rank's own.

        Yields:
            None; afterwards the parameters are this rank's own again.
        """
        own = self._parameters.copy()
        self._rounds.show_shared()
        try:
            yield
        finally:
            self._parameters.restore(own)

    def state_dict(self) -> dict:
        """This rank's part of a checkpoint, beside model.state_dict() and optimizer.state_dict(). No collective.

        Returns:
            The shared parameters, the outer optimizer's state, this rank's memory, and where it is in the round; the memories
            of all ranks after consolidate_state_dict(). Its arrays are tensors, so that torch.load(weights_only=True) reads it.
        """
        return to_torch(self._rounds.state_dict())

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on from a saved state: bit for bit, if each rank loads its own state, model and optimizer.

        Call it on all ranks. If a state lacks this rank's memory, `on_resize` decides, and the log "grace_ext" says so. No
        collective: in the next round the ranks make sure that they share the same parameters.

        Args:
            state_dict: What `state_dict` gave.

        Raises:
            ConfigError: It is of another model, outer optimizer or number of fragments, or of an unknown version.
        """
        if not isinstance(state_dict, dict):
            raise ConfigError(f"load_state_dict takes what state_dict gave, not {type(state_dict).__name__}")
        self._rounds.load_state_dict(to_numpy(state_dict))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the memories of all ranks for state_dict() on one, until the next round: a collective.

        Args:
            to: The rank that will save them.
        """
        consolidate(self._current(), self._worker, to)

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage, in total and of the last round. It waits for an exchange under way.

        Returns:
            What docs/observability.md describes, its steps being rounds of a fragment, and local_steps, rounds, lost_rounds,
            other_bytes_out and waited_seconds as in grace_ext.rounds.Rounds.stats.
        """
        return self._rounds.stats()


def _check(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], preset: str) -> None:
    """Raises ConfigError for what makes no sense with local steps."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "DistributedDataParallel exchanges gradients in each step: give the plain module, or for DDP within sites "
            "ddp.module and process_group=, a group with one rank of each site"
        )
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(f"optimizer={one!r}; allowed: a torch.optim.Optimizer, or a list of them")
        if hasattr(one, "_allreduce_grad_async") or hasattr(one, "consolidate_state_dict"):
            raise ConfigError(f"{type(one).__name__} exchanges something in each step: give the plain optimizer")
    if preset == "muloco" and not any("muon" in type(one).__name__.lower() for one in optimizers):
        raise ConfigError("preset 'muloco' is for local steps of Muon, and none of the optimizers is one")


def _ranks(process_group: Any, backend: str | None, timeout: Any, process_set: Any) -> tuple[Ranks, str]:
    """The ranks, and what the names of its collectives begin with."""
    hvd = sys.modules.get("horovod.torch")
    over_horovod = hvd is not None and hvd.is_initialized()
    of_torch = process_group is not None or timeout is not None
    if process_set is not None and of_torch:
        raise ConfigError("process_set is Horovod's, and process_group and timeout are torch.distributed's: give one")
    if process_set is None and not of_torch and over_horovod and dist.is_initialized():
        raise ConfigError("Horovod and torch.distributed are both initialized: say by process_set= or process_group= which")
    if process_set is not None or not of_torch and over_horovod:
        return _over_horovod(hvd, process_set, backend)
    transport = own_transport(process_group, backend, timeout)
    return Ranks(lambda: transport, lambda: (transport.rank, transport.size)), f"grace_ext.{transport.group_name}"


def _over_horovod(hvd: Any, process_set: Any, backend: str | None) -> tuple[Ranks, str]:
    from ._horovod.exits import guard_exit
    from ._horovod.local_rounds import ranks_of
    from ._torch.elastic_rounds import register
    from ._torch.horovod_backends import make_transport

    if backend not in (None, "horovod", "gloo"):
        raise ConfigError(f"backend={backend!r} with Horovod; allowed: None, 'horovod', or 'gloo' for PyTorch's Gloo")
    process_set, prefix = ranks_of(hvd, process_set, follows_changes=True)
    register()

    def make() -> Transport:
        guard_exit(hvd)
        return make_transport(process_set, backend, prefix)

    return Ranks(make, lambda: (process_set.rank(), process_set.size())), prefix

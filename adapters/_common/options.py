"""The options that all adapters share: how gradients are compressed, exchanged and observed."""

import concurrent.futures
import dataclasses
import logging
import os
from typing import Any, ClassVar, TypeVar

from grace_ext import ConfigError
from grace_ext.communicators.base import Communicator
from grace_ext.exchange import checkpoint
from grace_ext.exchange.engine import Exchange
from grace_ext.memory import Memory, make_memory
from grace_ext.memory.momentum import Momentum
from grace_ext.observe import Capture, parse_observers, warn_of_one_rank
from grace_ext.observe.advice import warn_of_large_steps, warn_of_residual
from grace_ext.observe.parse import Observe
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import Memories, Rules, bucket_size, default_for
from grace_ext.policy.defaults import PLAIN, Default
from grace_ext.transport.base import Transport

_LOG = logging.getLogger("grace_ext")
_DISTURBS_ADAM = 0.03  # the largest density at which error feedback of gradients is known to cost an Adam accuracy
OptionsType = TypeVar("OptionsType", bound="CompressionOptions")


@dataclasses.dataclass
class CompressionOptions:
    """How gradients are compressed, exchanged and observed: the keyword options that all adapters share.

    The wrappers of the adapters (DistributedOptimizer, DistributedGradientTape, CompressionState, OneBitAdam,
    exchange_gradients) take them as keywords. A few are not there in every adapter, as noted below.

    Attributes:
        compression: A spec ("topk:0.01/rice/qsgd:7", see `python -m grace_ext codecs`), its dict form, or a Compressor. With
            Horovod also hvd.Compression.none and .fp16, which mean dense gradients by allreduce without a memory. None: see
            docs/training.md, "Defaults". Without another memory, an Adam, AdamW or Muon whose step the adapter can change gets a
            default of its own, which the log "grace_ext" names; all others get "topk:0.01/rice/qsgd:7".
        memory: "residual" (error feedback), "none", "ef21", "dgc" or another (`python -m grace_ext codecs`), or specs by name
            pattern or size, as in rules: {"*embedding*": "none", "*": "residual:decay=0.9"}. None: "residual", or what the
            default of the optimizer has.
        communicator: "allgather"; "sharded" for many ranks or slow links, "tree" for few ranks, "hierarchical" for several ranks
            on each host (see docs/training.md); "allreduce" for dense raw and fp16 specs, and for randomk; or "auto", which
            measures these, except "tree", and float16 and float32 without compression in the first steps, and takes the fastest
            for each bucket.
            Dense float32 goes by allreduce: the result is the same and the bytes are fewer; little of it goes with the
            containers of allgather. Low-rank factors ("powersgd:4") go by allreduce, since only sums can carry them.
        rules: Specs by name pattern or size: {"*.bias": "dense/raw", "<=4096": "dense/raw"}. The first that fits counts. Where
            none fits, tensors of at most 1024 elements or fewer than two dimensions go into a dense float32 bucket.
        seed: The seed of the stochastic codecs; the same on all ranks.
        capture: A folder in which rank 0 saves its own gradients of steps 1, 10, 100, 1000 and 10000, before and after error
            feedback, for `python -m grace_ext bench --input FILE`; or a grace_ext.observe.Capture that names other steps. A
            full disk and similar errors end the capture with a warning, never the training. With one rank nothing is
            compressed, so there is nothing to capture: a warning says so.
        schedule: Options of the spec that change from step to step: {"density": "warmup:steps=2000"}, or a function of the
            step that gives the same on all ranks; see grace_ext.policy.Schedules. {"density": "kimad:0.2"} chooses what fits
            into steps of 0.2 s, on each rank by what its link gives; "kimad+:0.2" does so with a density for each bucket;
            "lgreco" sends the fewest bytes for the error that the spec's density gives, with a density for each bucket;
            "guarded" raises the density while much of the gradients waits to be sent, and lowers it while little does.
        observe: Where rank 0 writes bytes, ratio, seconds and residual norms of every tenth step: a path that ends in .jsonl
            or .csv, a folder for TensorBoard, an object of grace_ext.observe (which can take other steps, and a Timeline), or
            a list of these.
        bucket_bytes: The float32 bytes after which a bucket is closed, or "auto": 25 MiB, and with Horovod for PyTorch and communicator
            "allgather" less, if the first steps show that steps are shorter then (see docs/training.md). With Horovod and JAX
            only: DDP has buckets of its own.
        groups: Lists of parameters that share a bucket, or a number of equal groups; overrides bucket_bytes. With Horovod only.
        selection: "device" (gradients are encoded and summed where they are, by Triton's kernels or, without Triton and for
            top-k, by torch operations; what has neither raises ConfigError, small tensors by default excepted), "host", or
            "auto": device for tensors on an accelerator, host for what has no kernels. The bytes are the same. With PyTorch
            only.
        on_resize: What becomes of the memories when a checkpoint of another number of ranks is loaded, or when elastic Horovod
            adds or removes ranks. "reset": they start from zero. "redistribute": the sum of residuals is preserved, and each
            rank takes an equal part. None: redistribute, or reset with a warning where a checkpoint does not have all
            memories. With PyTorch and JAX only; in TensorFlow the functions that load a state take it.
        grad_scaler: The torch.amp.GradScaler that scales the loss, so that the memory keeps unscaled units. With PyTorch only.

    Raises:
        ConfigError: An option has a value that is not allowed.
    """

    compression: str | dict | Compressor | None = None
    memory: str | dict | Memory | None = None
    communicator: str = "allgather"
    rules: dict | None = None
    seed: int = 0
    capture: Capture | str | os.PathLike | None = None
    schedule: dict | None = None
    observe: Observe = None
    bucket_bytes: int | str = "auto"
    groups: list | int | None = None
    selection: str = "auto"
    on_resize: str | None = None
    grad_scaler: object = None
    #: What `choose_defaults` has chosen; no option of a wrapper.
    chosen: Default = dataclasses.field(default=PLAIN, repr=False)

    #: The options above that an adapter does not have.
    absent: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.selection not in ("auto", "host", "device"):
            raise ConfigError(f"selection={self.selection!r}; allowed: auto, host, device")
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise ConfigError(f"grad_scaler={self.grad_scaler!r}; allowed: a torch.amp.GradScaler")
        if self.bucket_bytes != "auto" and (not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1):
            raise ConfigError(f"bucket_bytes={self.bucket_bytes!r}; allowed: a number of bytes from 1 on, or 'auto'")
        checkpoint.check_policy(self.on_resize)
        #: What `capture` and `observe` stand for.
        self.observers = parse_observers(self.capture, self.observe)

    @property
    def largest_bucket(self) -> int:
        """The bytes of float32 after which a bucket is closed, as far as the options say."""
        return bucket_size.SIZES[0] if isinstance(self.bucket_bytes, str) else self.bucket_bytes

    @classmethod
    def from_keywords(cls: type[OptionsType], keywords: dict, **named: Any) -> OptionsType:
        """The options of a wrapper.

        Args:
            keywords: What its user gave as keywords beside its own parameters.
            **named: Its own parameters.

        Returns:
            An object of this class.

        Raises:
            TypeError: A keyword is not one of the options.
            ConfigError: An option has a value that is not allowed.
        """
        allowed = [field.name for field in dataclasses.fields(cls) if field.name not in ("chosen", *cls.absent, *named)]
        unknown = sorted(keywords.keys() - set(allowed))
        if unknown:
            raise TypeError(f"unknown option {', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}")
        return cls(**named, **keywords)

    def choose_defaults(self, memory: str | dict[str, str] | None, members: tuple[int, int]) -> None:
        """Fill in what the user has left open, say in the log what an Adam or a Muon gets, and warn of memories that disturb it.

        Args:
            memory: See `default_for`.
            members: This rank, and the number of ranks. Only rank 0 says something, and only if there are others.
        """
        own = self.memory is None or isinstance(memory, str) and _kind(self.memory) == _kind(memory)
        self.chosen = chosen = default_for(memory if self.compression is None and own else None)
        speaks = members[0] == 0 and members[1] > 1
        if chosen is PLAIN and memory is not None and self.memory is None and speaks:
            density = self.make_rules().default.density
            if 0 < density <= _DISTURBS_ADAM:
                warn_of_residual(memory, density)
        given = self.memory.values() if isinstance(self.memory, dict) else [self.memory]
        # On all ranks, so that a spec that is refused is refused at the same point.
        momenta = [make_memory(one) for one in given if one is not None and _kind(one) == Momentum.name]
        gain = max((one.step_gain for one in momenta if isinstance(one, Momentum)), default=1.0)
        if memory == "adam" and gain > 1 and speaks:
            warn_of_large_steps(gain)
        self.compression = chosen.compression if self.compression is None else self.compression
        self.memory = chosen.memory if self.memory is None else self.memory
        self.schedule = chosen.schedule if self.schedule is None else self.schedule
        if chosen is not PLAIN and speaks:
            _LOG.info(
                "compression=%r, memory=%r, schedule=%r, small tensors %r: the default for %s",
                chosen.compression,
                sorted(set(self.memory.values())) if isinstance(self.memory, dict) else str(self.memory),
                self.schedule,
                chosen.small,
                chosen.why,
            )

    def warn_of_one_rank(self, stacklevel: int) -> None:
        """Warn that with one rank there is nothing to capture or observe.

        Args:
            stacklevel: As in warnings.warn, seen from the caller.
        """
        warn_of_one_rank(*self.observers, stacklevel + 1)

    @property
    def _memory(self) -> str | dict | Memory:
        return PLAIN.memory if self.memory is None else self.memory

    def make_exchange(
        self,
        transport: Transport,
        weight: float,
        executor: concurrent.futures.Executor | None = None,
        joinable: bool = False,
    ) -> Exchange:
        """An exchange with these options.

        Args:
            transport: The adapter's transport.
            weight: What the sum over ranks is multiplied with.
            executor: See Exchange.
            joinable: See Exchange.

        Returns:
            The exchange, without buckets.
        """
        capture, observe = self.observers
        exchange = Exchange(transport, self._memory, weight, self.seed, capture, executor, self.schedule, joinable, observe)
        exchange.schedules.required = self.schedule is not self.chosen.schedule
        return exchange

    def refuse_steps_in_memory(self, why: str) -> None:
        """Check that no memory has to change the optimizer's step.

        Args:
            why: What to do instead, for the message.

        Raises:
            ConfigError: One has to.
        """
        for memory in Memories(self._memory).all():
            if memory.needs_step:
                raise ConfigError(f"memory {str(memory)!r} changes the optimizer's step: {why}")

    def make_rules(self) -> Rules:
        """Which spec each tensor gets.

        Returns:
            The rules, with `compression` as their default.
        """
        compression = PLAIN.compression if self.compression is None else self.compression
        return Rules(compression, self.rules, self.seed, self.chosen.small, self.chosen.rows)

    def make_communicator(self) -> Communicator:
        """How buckets are exchanged.

        Returns:
            The communicator.
        """
        return parse_stage("communicator", self.communicator)  # type: ignore[return-value]


def _kind(memory: object) -> str:
    return str(memory).partition(":")[0]

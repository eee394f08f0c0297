"""What an exchange is set up with, and what changes between its steps only: buckets, policies, listeners and state."""

from collections.abc import Callable, Sequence

import numpy as np

from ..communicators.allgather import Allgather
from ..communicators.allreduce import Allreduce
from ..communicators.auto import WITH_FLOAT32, Accompanying, Auto
from ..communicators.base import Communicator
from ..communicators.exact_steps import ExactSteps
from ..communicators.factors import FactorAllreduce
from ..memory.base import Memory
from ..observe.capture import Capture
from ..observe.listener import Listeners, StepListener
from ..observe.parse import Observe
from ..pipeline.compressor import Compressor
from ..policy.memories import Memories
from ..policy.schedules import Schedules
from ..transport.base import Transport
from . import config_digest, stats
from .buckets import Bucket, Tensor
from .fusion import goes_with_containers
from .listeners import listeners_for
from .state import DENSITY, ExchangeState


class ExchangeSetup:
    """The part of an Exchange that is at work between steps.

    Args:
        transport: See Exchange.
        memory: See Exchange.
        weight: See Exchange.
        seed: See Exchange.
        capture: See Exchange.
        schedule: See Exchange.
        observe: See Exchange.
    """

    def __init__(
        self,
        transport: Transport,
        memory: str | Memory | dict,
        weight: float,
        seed: int,
        capture: Capture | None,
        schedule: dict | None,
        observe: Observe,
    ):
        self.state = ExchangeState(Memories(memory))
        self.schedules = Schedules(schedule)
        self.statistics = stats.Statistics()
        self._listeners = Listeners([*listeners_for(transport, self.schedules, observe, capture), self.statistics])
        self.transport = self._listeners.wrap(transport)
        self.weight = weight
        self.seed = seed
        self.step = 0
        self.buckets: list[Bucket] = []

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        """The listeners, in the order in which they hear of an event."""
        return self._listeners.all

    def bucket(self, name: str, tensors: list[Tensor], compressor: Compressor, communicator: Communicator) -> Bucket:
        """Build the bucket of these tensors.

        Two kinds of buckets go by allreduce whatever the communicator: plain float32, because the result is the same and
        the bytes are fewer, without errors to remember; and low-rank factors, because only sums carry them. With communicator
        `allgather`, float32 of few bytes goes with the containers of other buckets, which spares a collective; with `sharded`,
        all of it by one allgather; and with `auto` by allgather in steps in which some bucket uses one of the two. A communicator
        that `needs_each_rank` carries float32 itself, and refuses factors.

        Args:
            name: Name of the bucket, unique in the exchange and the same on all ranks.
            tensors: The tensors, in the order in which the bucket's vector holds them.
            compressor: The compressor of all of them.
            communicator: The communicator that the user asked for.

        Returns:
            The bucket, with a communicator of its own where the communicator needs one for each bucket.

        Raises:
            ConfigError: Compressor, memory and communicator do not fit together.
        """
        memory = self.memory_of(tensors[0]).for_compressor(compressor)
        if compressor.exact and not communicator.needs_each_rank:
            return Bucket(name, tensors, compressor, self._for_float32(communicator, tensors), memory)
        factors = FactorAllreduce(tensors, compressor, self.state.warm_starts) if compressor.lowrank is not None else None
        own = communicator.for_bucket(compressor, memory, self.transport, factors)
        if memory.has_exact_steps:
            own = ExactSteps(own, memory, name)
        return Bucket(name, tensors, compressor, own, memory)

    def _for_float32(self, communicator: Communicator, tensors: list[Tensor]) -> Communicator:
        """See `bucket`."""
        if goes_with_containers(self.transport, sum(one.size for one in tensors)):
            if communicator.name in WITH_FLOAT32:
                return Allgather()
            if communicator.name == Auto.name and tensors[0].device == "cpu":
                return Accompanying()
        return Allreduce()

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Replace the buckets; the memory's state follows its tensors into the new ones.

        Args:
            buckets: The buckets of all further steps, in the same order on all ranks.

        Raises:
            ConfigError: A step is under way, or a listener cannot work with these buckets; then all stays as it was.
        """
        self._listeners.notify("check_buckets", buckets)
        densities = self.schedules.kept_densities(self.buckets)
        self.state.set_buckets(buckets)
        self.buckets = buckets
        self._listeners.notify("buckets_set", buckets)
        self.schedules.restore_densities(buckets, densities)

    def replace_policies(self, memories: Memories, schedules: Schedules) -> None:
        """Use other memories and schedules for the buckets that are set next.

        Args:
            memories: Which memory each tensor has.
            schedules: Options by step. The listeners stay those of the schedules that the exchange was made with.
        """
        self.state.memories, self.schedules = memories, schedules

    def memory_of(self, tensor: Tensor) -> Memory:
        """Choose the memory of a tensor that is compressed. Tensors of a bucket have the same one.

        Args:
            tensor: The tensor.

        Returns:
            The memory, shared by all tensors of equal memory specs.
        """
        return self.state.memories.choose(tensor.name, tensor.size)

    def state_dict(self, take: bool = False) -> dict:
        """Copy this rank's state between steps.

        Args:
            take: Whether to remove the states of the memories, which needs no copies.

        Returns:
            {"step": the number of the next step, field: {tensor name: float32[size]}}; see ExchangeState.
        """
        densities = self.schedules.kept_densities(self.buckets)
        return {"step": self.step, **self.state.state_dict(take), **({DENSITY: densities} if densities else {})}

    def load_state_dict(self, state: dict, take: bool = False) -> None:
        """Load what `state_dict` returned.

        Args:
            state: The state; without "step", the number of the next step stays as it is.
            take: Whether to remove the states of the memories from `state` as they are loaded.

        Raises:
            ConfigError: An array has another size than its tensor.
        """
        self.state.load_state_dict(state, take)
        self.schedules.restore_densities(self.buckets, state.get(DENSITY, {}))
        self.step = state.get("step", self.step)

    def skip_step(self) -> None:
        """Count a step in which nothing is exchanged, as those of one rank alone."""
        self.step += 1
        self.statistics.steps += 1

    def states_settled(self) -> None:
        """Note, between steps and on all ranks, that the ranks have settled which states they start from."""
        for bucket in self.buckets:
            bucket.communicator.memory_replaced()

    def config_digest(self) -> np.ndarray:
        """See grace_ext.exchange.config_digest.config_digest.

        Returns:
            uint8[16].
        """
        return config_digest.config_digest(self)

    def check_config_digests(self, gathered: np.ndarray) -> None:
        """See grace_ext.exchange.config_digest.check_config_digests.

        Args:
            gathered: uint8[ranks, 16], the digests of all ranks in the order of ranks, in any shape.
        """
        config_digest.check_config_digests(self, gathered)

    def stats(self, *others: "ExchangeSetup", earlier: Sequence[stats.Statistics] = ()) -> dict:
        """Report totals since the start.

        Args:
            *others: Other exchanges of the same run, whose totals are added.
            earlier: The statistics of exchanges that this one has replaced, whose totals are added.

        Returns:
            What grace_ext.exchange.stats.report describes.
        """
        return stats.report((*others, self), earlier)

    def bypass_dtype(self, bucket: Bucket) -> str | None:
        """Say whether the adapter may reduce the bucket's tensors itself in this step, and `submit_bypass` that.

        Args:
            bucket: One of `buckets`.

        Returns:
            "float32" or "fp16", the dtype to reduce, the same on all ranks; None if the bucket has to `start`.
        """
        return bucket.communicator.bypass_dtype if bucket.may_bypass and not bucket.memory.has_hooks else None

    def gradient_callback(self, bucket: Bucket) -> Callable | None:
        """Find who wants to see the gradient of a bucket that bypasses the exchange.

        Args:
            bucket: One of `buckets`.

        Returns:
            A function to call with (gradient, None), the gradient float32[size]; None if nobody wants to see it.
        """
        return self._listeners.callback("gradient_callback", self.step, bucket)

    def _apply_schedules(self, bucket: Bucket) -> None:
        """Give the bucket its compressor of this step."""
        if self.schedules:
            bucket.compressor = self.schedules.at(bucket.declared, self.step, self.schedules.densities.get(bucket.name))

    def _collectives_of(self, bucket: Bucket) -> int:
        return len(bucket.communicator.collectives_of(self.transport))

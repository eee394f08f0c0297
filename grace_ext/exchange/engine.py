"""The exchange of a training step: buckets are encoded and sent in a worker thread while backward goes on, then summed.

Frameworks differ in how gradients get in and out; everything between is here, so that every adapter does the same.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Callable

import numpy as np

from .._util.rng import Stream
from ..communicators.allreduce import Allreduce
from ..communicators.base import Communicator, Pending
from ..communicators.factors import FactorAllreduce
from ..errors import ConfigError
from ..memory.base import Memory
from ..observe.capture import Capture
from ..observe.listener import Listeners, StepListener
from ..pipeline.compressor import Compressor
from ..policy.memories import Memories
from ..policy.schedules import Schedules
from ..transport.base import Transport
from . import config_digest, stats
from .assembly import listeners_for
from .buckets import Bucket, Tensor
from .bypass import BypassPending
from .scheduler import Scheduler
from .state import ExchangeState


class Exchange:
    """Starts and finishes the buckets of each step, and keeps the memory consistent.

    Args:
        transport: the collectives of the library that moves the bytes.
        memory: a Memory, its spec, or specs by name pattern (grace_ext.policy.Memories).
        weight: what the sum over ranks is multiplied with (1 / ranks for an average).
        seed: of the stochastic codecs; the same on all ranks.
        capture: saves gradients of rank 0.
        executor: of the one thread that encodes while others compute; one of its own if None.
        schedule: options by step (grace_ext.policy.Schedules).
        joinable: whether ranks may leave the loop before others, and shadow the steps of these (grace_ext.exchange.shadow).
        observe: who looks on (grace_ext.observe.observers).

    Raises:
        ConfigError: an argument is not one of those that are allowed.
    """

    def __init__(
        self,
        transport: Transport,
        memory,
        weight: float,
        seed: int = 0,
        capture: Capture | None = None,
        executor: concurrent.futures.Executor | None = None,
        schedule: dict | None = None,
        joinable: bool = False,
        observe=None,
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
        self._joinable = joinable
        self._starting = threading.Lock()  # backward may have a thread for each device
        self._finite = True
        self._ranks_with_gradients: concurrent.futures.Future | None = None  # where they are counted
        self._scheduler = Scheduler(
            executor, self._advance, self._receive, functools.partial(self._listeners.notify, "bucket_failed")
        )

    # Between steps

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        return self._listeners.all

    def bucket(self, name: str, tensors: list[Tensor], compressor: Compressor, communicator: Communicator) -> Bucket:
        """The bucket of these parts. Two kinds go by allreduce whatever the communicator: plain float32, because the result
        is the same and the bytes are fewer, without errors to remember; and low-rank factors, because only sums carry them.

        Raises:
            ConfigError: the parts do not fit together.
        """
        memory = self.memory_of(tensors[0])
        if compressor.exact:
            return Bucket(name, tensors, compressor, Allreduce(), memory.exact())
        factors = FactorAllreduce(tensors, compressor, self.state.warm_starts) if compressor.lowrank is not None else None
        own = communicator.for_bucket(compressor, memory, self.transport, factors)
        return Bucket(name, tensors, compressor, own, memory)

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Replace the buckets; the memory's state follows its tensors into the new ones."""
        if not self._scheduler.is_idle:
            raise ConfigError("buckets cannot change while an exchange is under way")
        self.buckets = buckets
        self._scheduler.buckets = len(buckets)
        self.state.set_buckets(buckets)
        self._listeners.notify("buckets_set", buckets)

    def replace_policies(self, memories: Memories, schedules: Schedules) -> None:
        """For the buckets that are set next."""
        self.state.memories, self.schedules = memories, schedules

    def memory_of(self, tensor: Tensor) -> Memory:
        """The memory of a tensor that is compressed. Tensors of a bucket have the same one."""
        return self.state.memory_of(tensor)

    def state_dict(self) -> dict:
        """This rank's state between steps: {"step": the number of the next one, field: {tensor name: float32[size]}}; see
        ExchangeState."""
        return {"step": self.step, **self.state.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """The inverse. Raises ConfigError for a state of another size."""
        self.state.load_state_dict(state)
        self.step = state.get("step", self.step)

    def config_digest(self) -> np.ndarray:
        """See grace_ext.exchange.config_digest."""
        return config_digest.config_digest(self)

    def check_config_digests(self, gathered: np.ndarray) -> None:
        """See grace_ext.exchange.config_digest."""
        config_digest.check_config_digests(self, gathered)

    def stats(self, *others: "Exchange") -> dict:
        """Totals since the start, those of the others included: see grace_ext.exchange.stats.report."""
        return stats.report((*others, self))

    # A step: each bucket is started (or bypasses), advanced and finished

    def start(self, bucket: Bucket, pack: Callable, out=None) -> None:
        """Queue the bucket: the worker thread packs, encodes and sends it.

        Args:
            pack: as Bucket.start says. It must not need the caller's thread.
            out: what `finish` will be given, if it may be written to from now on: then the worker decodes the bucket as soon
                as it has arrived and there is nothing to encode.
        """
        with self._starting:
            if self._scheduler.is_idle:
                self.begin_step()
            seen, compensated = (
                self._listeners.callback(event, self.step, bucket)
                for event in ("gradient_callback", "compensated_gradient_callback")
            )
            self._submit(
                bucket,
                functools.partial(bucket.start, pack=pack, on_gradient=seen, on_compensated_gradient=compensated),
                out,
            )

    def start_empty(self, bucket: Bucket) -> None:
        """Take part with nothing, and leave the memory as it is."""
        self._submit(bucket, bucket.start_empty)

    def _submit(self, bucket: Bucket, start: Callable, out=None) -> None:
        transport = self._listeners.transport_of(self.step, bucket, self.transport)
        send = functools.partial(start, transport=transport, stream=self._stream_of(bucket))
        self._scheduler.submit(bucket, send, out, self._collectives_of(bucket))

    def _collectives_of(self, bucket: Bucket) -> int:
        return len(bucket.communicator.collectives_of(self.transport))

    def bypass_dtype(self, bucket: Bucket) -> str | None:
        """ "float32" or "fp16": so the adapter may reduce the bucket's tensors in this step itself, and say so by
        `submit_bypass`; the same on all ranks. None if the bucket has to `start`."""
        return bucket.communicator.bypass_dtype if bucket.may_bypass else None

    def submit_bypass(self, bucket: Bucket, pending: BypassPending) -> None:
        """In the place of `start`. `finish` waits for it, and writes nothing."""
        with self._starting:
            if self._scheduler.is_idle:
                self.begin_step()
            self._scheduler.submit_sent(bucket, pending)

    def gradient_callback(self, bucket: Bucket) -> Callable | None:
        """What wants to see the gradient of a bucket that bypasses: a function (float32[size], None). Or None."""
        return self._listeners.callback("gradient_callback", self.step, bucket)

    def begin_step(self, gradients: bool = True) -> None:
        """Before the first bucket. Where no bucket says by its length how many ranks have gradients, they are counted."""
        self._listeners.notify("step_started")
        if self._joinable and not any(bucket.communicator.sends_containers for bucket in self.buckets):
            self._ranks_with_gradients = self._scheduler.run(
                self.transport.allreduce, f"{self.buckets[0].name}.ranks", np.full(1, gradients, np.float32)
            )

    def ranks_with_gradients(self) -> int | None:
        """How many there are in this step; None if they were not counted."""
        counting, self._ranks_with_gradients = self._ranks_with_gradients, None
        return None if counting is None else int(counting.result().wait()[0])

    def _stream_of(self, bucket: Bucket) -> Stream:
        """This step's. The compressor becomes this step's, too."""
        if self.schedules:
            bucket.compressor = self.schedules.at(bucket.declared, self.step, self.schedules.densities.get(bucket.name))
        return Stream(self.seed, bucket.tensors[0].common_name, self.step, self.transport.rank)

    def is_started(self, bucket: Bucket) -> bool:
        return self._scheduler.is_started(bucket)

    def unfinished(self) -> tuple[str, ...]:
        """Names of the buckets that were started in this step and are not finished. For any thread."""
        return self._scheduler.unfinished()

    def pending(self, bucket: Bucket) -> Pending:
        """What the started bucket waits for, once it is encoded and sent."""
        return self._scheduler.pending(bucket)

    def advance(self, *buckets: Bucket) -> None:
        """When all buckets are started: let those of several dependent collectives start all but the first, so that they
        overlap. The given ones start the next."""
        if buckets:
            self._scheduler.advance(buckets)
        else:
            self._scheduler.advance_all([(bucket, self._collectives_of(bucket)) for bucket in self.buckets])

    def _advance(self, bucket: Bucket, pending: Pending) -> None:
        self._listeners.notify("receiving", self.step, bucket, pending)
        bucket.advance(pending, self.transport)
        self._listeners.notify("received", self.step, bucket, pending)

    def finish(self, bucket: Bucket, out) -> None:
        """Wait for the bucket and write the weighted sum over ranks to out (float32[size], or what the bucket's own `finish`
        says). Raises what the worker thread raised."""
        pending, finite = self._scheduler.receive(bucket, out, self.buckets)
        self._finite &= finite
        self._listeners.notify("bucket_finished", self.step, bucket, pending)

    def _receive(self, bucket: Bucket, pending: Pending, out) -> bool:
        self._listeners.notify("receiving", self.step, bucket, pending)
        finite = bucket.finish(pending, self.transport, out, self.weight)
        self._listeners.notify("received", self.step, bucket, pending)
        return finite

    def end_step(self) -> bool:
        """Close the step after all buckets are finished.

        Returns:
            False if some rank's gradient was not finite: then every memory on every rank stays as it was.
        """
        self.ranks_with_gradients()
        finite, step = self._finite, self.step
        self.state.commit() if finite else self.state.rollback()
        self.statistics.add_overlap(self._scheduler.overlap)
        self.forget_step()
        self.step += 1
        self._listeners.notify("end_step", step, finite, self.statistics.step_report)
        return finite

    def forget_step(self) -> None:
        """Nothing of the step is under way any more."""
        self._scheduler.end_step()
        self._finite, self._ranks_with_gradients = True, None

    def abort(self) -> None:
        """Give up a step; the memory stays as it was."""
        self._scheduler.cancel()  # what runs would still begin a memory's step
        self.forget_step()
        self.state.rollback()
        self._listeners.notify("abort")

    def close(self) -> None:
        """Give up a step under way and end the worker thread: for an exchange that another one takes the place of."""
        self.abort()
        self._scheduler.close()

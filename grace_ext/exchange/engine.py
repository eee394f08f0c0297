"""The exchange of a training step: buckets are encoded and sent in a worker thread while backward goes on, then summed.

Frameworks differ in how gradients get in and out. All that lies between packing a gradient and receiving its sum is here.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

from .._util.rng import Stream
from ..communicators.base import Pending
from ..errors import ConfigError
from ..memory.base import Memory
from ..observe.capture import Capture
from ..observe.parse import Observe
from ..transport.base import Transport
from .buckets import Bucket
from .bypass import BypassPending
from .gradient_count import GradientCount
from .order import CollectiveOrder
from .scheduler import Scheduler
from .setup import ExchangeSetup


class Exchange(ExchangeSetup):
    """Starts, advances and finishes the buckets of each step, and ends the step on all ranks alike.

    Args:
        transport: The collectives of the library that moves the bytes.
        memory: A Memory, its spec, or specs by name pattern (grace_ext.policy.Memories).
        weight: Factor of the sum over ranks; 1 / ranks for an average.
        seed: Seed of the stochastic codecs; the same on all ranks.
        capture: Saves gradients of rank 0; None for nothing.
        executor: Executor of the one thread that encodes while others compute; None for one of its own.
        schedule: Options by step (grace_ext.policy.Schedules).
        joinable: Whether ranks may leave the training loop before others and shadow their steps (grace_ext.exchange.shadow).
        observe: Observers, as grace_ext.observe.observers takes them.

    Raises:
        ConfigError: An argument has a value that is not allowed.
    """

    def __init__(
        self,
        transport: Transport,
        memory: str | Memory | dict,
        weight: float,
        seed: int = 0,
        capture: Capture | None = None,
        executor: concurrent.futures.Executor | None = None,
        schedule: dict | None = None,
        joinable: bool = False,
        observe: Observe = None,
    ):
        super().__init__(transport, memory, weight, seed, capture, schedule, observe)
        self._starting = threading.Lock()  # backward may have a thread for each device
        self._joinable, self._finite = joinable, True
        self._received: list[tuple[Bucket, Pending]] = []  # those whose results wait for the end of the step
        failed = functools.partial(self._listeners.notify, "bucket_failed")
        self._scheduler = Scheduler(executor, self._advance, self._receive, failed)
        #: How many ranks have gradients in this step, where no bucket says so by the lengths of its containers.
        self.gradient_count = GradientCount(self._scheduler, self.transport)
        #: Keeps the order of a step's collectives.
        self.order = CollectiveOrder(self._scheduler, self.transport)

    def set_buckets(self, buckets: list[Bucket]) -> None:
        if not self._scheduler.is_idle:
            raise ConfigError("buckets cannot change while an exchange is under way")
        super().set_buckets(buckets)
        self._scheduler.bucket_count = len(buckets)

    def start(self, bucket: Bucket, pack: Callable, out: object = None) -> None:
        """Queue the bucket: the worker thread packs, encodes and sends it.

        Args:
            bucket: One of `buckets`.
            pack: See Bucket.start. It must not need the caller's thread.
            out: What `finish` will be given, if it may be written to from now on: then the worker decodes the bucket as
                soon as it has arrived and there is nothing to encode.
        """
        with self._starting:
            if self._scheduler.is_idle:
                self.begin_step()
            seen, compensated = (
                self._listeners.callback(event, self.step, bucket)
                for event in ("gradient_callback", "compensated_gradient_callback")
            )
            encode = functools.partial(bucket.start, pack=pack, on_gradient=seen, on_compensated_gradient=compensated)
            self._submit(bucket, encode, out)

    def wait_for_room(self) -> None:
        """Before a start, wait while much waits to be encoded; for gradients that are freed once they are."""
        self._scheduler.wait_for_room()

    def start_empty(self, bucket: Bucket) -> None:
        """Take part with nothing, and leave the memory as it is.

        Args:
            bucket: One of `buckets`.
        """
        self._submit(bucket, bucket.start_empty)

    def _submit(self, bucket: Bucket, start: Callable, out: object = None) -> None:
        self._apply_schedules(bucket)
        transport = self._listeners.transport_of(self.step, bucket, self.transport)
        stream = Stream(self.seed, bucket.tensors[0].common_name, self.step, self.transport.rank)
        send = functools.partial(start, transport=transport, stream=stream)
        self._scheduler.submit(bucket, send, out, self._collectives_of(bucket))

    def submit_bypass(self, bucket: Bucket, pending: BypassPending) -> None:
        """Take a bucket that bypasses the exchange, in the place of `start`. `finish` waits for it and writes nothing.

        Args:
            bucket: One of `buckets`.
            pending: The library's allreduce of its gradients.
        """
        with self._starting:
            if self._scheduler.is_idle:
                self.begin_step()
            self._scheduler.submit_sent(bucket, pending)

    def begin_step(self, gradients: bool = True) -> None:
        """Begin a step, before its first bucket. `start` and `submit_bypass` do so where it has not begun.

        Args:
            gradients: Whether this rank has gradients in this step.

        Raises:
            ExchangeError: See CollectiveOrder.check.
        """
        self.order.check()
        self._listeners.notify("step_started")
        if self._joinable and self.gradient_count.is_needed(self.buckets):
            self.gradient_count.start(f"{self.buckets[0].name}.ranks", gradients)

    def is_started(self, bucket: Bucket) -> bool:
        """Say whether the bucket was started, or bypasses, in this step.

        Args:
            bucket: One of `buckets`.

        Returns:
            Whether it was.
        """
        return self._scheduler.is_started(bucket)

    def unfinished(self) -> tuple[str, ...]:
        """Name the buckets that were started in this step and are not finished. Any thread may call it.

        Returns:
            Their names, in the order in which they were started.
        """
        return self._scheduler.unfinished()

    def pending(self, bucket: Bucket) -> Pending:
        """Wait until a started bucket is encoded and sent.

        Args:
            bucket: One of `buckets`.

        Returns:
            What the bucket waits for from now on.
        """
        return self._scheduler.pending(bucket)

    def advance(self, *buckets: Bucket) -> None:
        """Start the collectives that need the result of one before.

        Args:
            *buckets: Buckets whose next collective is started. Without any, when all buckets are started, those of several
                dependent collectives start all but the first, so that they overlap.
        """
        if buckets:
            self._scheduler.advance(buckets)
            return
        self.order.before_waiting(self.buckets, self._joinable and not self.gradient_count.is_needed(self.buckets))
        self._scheduler.advance_all([(bucket, self._collectives_of(bucket)) for bucket in self.buckets])

    def _advance(self, bucket: Bucket, pending: Pending) -> None:
        self._observed(bucket.advance, bucket, pending)

    def finish(self, bucket: Bucket, out: object) -> None:
        """Wait for the bucket and write the weighted sum over ranks. Raises what the worker thread raised.

        Args:
            bucket: One of `buckets`.
            out: Where the sum is written to: float32[size], or what the bucket's own `finish` says. If the bucket `uses_loan`,
                the sum is in what was lent when the step has ended.
        """
        pending, finite = self._scheduler.receive(bucket, out, self.buckets)
        self._finite &= finite
        if pending.lender is None:
            self._listeners.notify("bucket_finished", self.step, bucket, pending)
        else:
            self._received.append((bucket, pending))

    def _receive(self, bucket: Bucket, pending: Pending, out: object) -> bool:
        return self._observed(bucket.finish, bucket, pending, out, self.weight)

    def _settle(self, bucket: Bucket, pending: Pending) -> None:
        self._observed(bucket.settle, bucket, pending, self.weight, self._finite)

    def _observed(self, work: Callable, bucket: Bucket, pending: Pending, *args: Any) -> Any:
        self._listeners.notify("receiving", self.step, bucket, pending)
        result = work(pending, self.transport, *args)
        self._listeners.notify("received", self.step, bucket, pending)
        return result

    def end_step(self) -> bool:
        """End the step after all buckets are finished; write the results of those that use loans.

        Returns:
            False if some rank's gradient was not finite, those that bypass left aside: then all memories stay as they were.
        """
        self.gradient_count.take()
        finite, step = self._finite, self.step
        for bucket, pending in self._received:
            self._scheduler.overlap.decode(self._settle, bucket, pending, others=())
            self._listeners.notify("bucket_finished", step, bucket, pending)
        self.state.commit() if finite else self.state.rollback()
        self.statistics.add_overlap(self._scheduler.overlap)
        self.forget_step()
        self.step += 1
        self._listeners.notify("end_step", step, finite, self.statistics.step_report)
        return finite

    def forget_step(self) -> None:
        """Forget the step: nothing of it is under way any more."""
        self._scheduler.end_step()
        self.gradient_count.forget()
        self._received.clear()
        self._finite = True

    def abort(self) -> None:
        """Give up a step; the memory stays as it was."""
        self.order.give_up_step()
        self._scheduler.cancel()  # first, because a bucket that is being encoded would begin a step of its memory
        self.forget_step()
        self.state.rollback()
        self._listeners.notify("abort")

    def close(self) -> None:
        """Abort a step under way and end the worker thread, because another exchange replaces this one."""
        self.abort()
        self._scheduler.close()

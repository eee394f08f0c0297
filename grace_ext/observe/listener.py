"""The interface of all that hears of an exchange's steps, and may decide between them what the next ones do."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..communicators.base import Communicator, Pending
from ..communicators.factors import ShapedTensor
from ..pipeline.compressor import Compressor
from ..transport.base import Transport


class BucketView(Protocol):
    """What listeners see of a bucket, a grace_ext.exchange.buckets.Bucket."""

    name: str
    size: int
    compressor: Compressor
    declared: Compressor
    communicator: Communicator
    memory: Any

    @property
    def tensors(self) -> Sequence[ShapedTensor]:
        """The tensors, in the order in which the bucket's vector holds them."""


class StepListener:
    """The events of a step, in the order in which they come. Here none of them does anything.

    Buckets are grace_ext.exchange.buckets.Bucket. Events of a step come from the caller's thread, in the same order on every
    rank; those of a bucket may come from the worker thread, and in another order on each rank. A listener may use collectives
    in `end_step`, and in no other event.
    """

    def wrap_transport(self, transport: Transport) -> Transport:
        """Wrap the exchange's transport, once, when the exchange is made.

        Args:
            transport: The transport that the exchange would use.

        Returns:
            The transport that the exchange is to use.
        """
        return transport

    def signature(self) -> tuple:
        """Tell what of the listener has to be the same on all ranks, for the configuration digest.

        Returns:
            Values whose repr is the same on all ranks.
        """
        return ()

    def check_buckets(self, buckets: Sequence[BucketView]) -> None:
        """Called before the exchange gets these buckets, to refuse them while nothing has changed.

        Args:
            buckets: The buckets, in the same order on all ranks.

        Raises:
            ConfigError: The listener cannot work with them.
        """

    def buckets_set(self, buckets: Sequence[BucketView]) -> None:
        """Called between steps when the exchange has these buckets from now on.

        Args:
            buckets: The buckets, in the same order on all ranks.
        """

    def started_together(self, bucket: BucketView) -> list[str]:
        """Name the buckets without which the collective of this one does not start in this step.

        Args:
            bucket: The bucket.

        Returns:
            Their names.
        """
        return []

    def step_started(self) -> None:
        """Called when a step begins, before its first bucket."""

    def gradient_callback(self, step: int, bucket: BucketView) -> Callable | None:
        """Ask to see the gradient of a bucket before the memory changes it.

        Args:
            step: Number of the step.
            bucket: The bucket.

        Returns:
            A function to call with (gradient, residual or None), both float32[size]; None if there is nothing to see in this
            step.
        """

    def compensated_gradient_callback(self, step: int, bucket: BucketView) -> Callable | None:
        """Ask to see the gradient of a bucket after the memory has changed it, and before it is encoded.

        Args:
            step: Number of the step.
            bucket: The bucket.

        Returns:
            As `gradient_callback`.
        """

    def bucket_transport(self, step: int, bucket: BucketView, transport: Transport) -> Transport:
        """Wrap the transport that a bucket starts with in this step.

        Args:
            step: Number of the step.
            bucket: The bucket.
            transport: The transport that the bucket would start with.

        Returns:
            The transport that it is to start with.
        """
        return transport

    def bucket_failed(self, bucket: BucketView, error: BaseException) -> None:
        """Called when a bucket could not be encoded or sent: in this step nothing comes of it.

        Args:
            bucket: The bucket.
            error: Why.
        """

    def receiving(self, step: int, bucket: BucketView, pending: Pending) -> None:
        """Called when a bucket is about to be advanced or finished.

        Args:
            step: Number of the step.
            bucket: The bucket.
            pending: What it waits for.
        """

    def received(self, step: int, bucket: BucketView, pending: Pending) -> None:
        """Called when a bucket was advanced or finished.

        Args:
            step: Number of the step.
            bucket: The bucket.
            pending: What it waits for, or waited for.
        """

    def bucket_finished(self, step: int, bucket: BucketView, pending: Pending) -> None:
        """Called when a bucket's sum over ranks is there.

        Args:
            step: Number of the step.
            bucket: The bucket.
            pending: What it waited for.
        """

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        """Called when a step is over: nothing of it is under way, and the states of the next step are in force.

        Args:
            step: Number of the step that is over.
            finite: Whether the gradients of all ranks were finite.
            report: report() gives the step's part of Exchange.stats.
        """

    def abort(self) -> None:
        """Called when the step is given up."""

    def stats(self) -> dict:
        """Report the listener's part of Exchange.stats.

        Returns:
            Fields by name; values that are dicts are merged over exchanges.
        """
        return {}


class Listeners:
    """Passes events to the listeners that have something to do with them, in their order.

    Args:
        listeners: The listeners.
    """

    def __init__(self, listeners: Sequence[StepListener]):
        self.all = tuple(listeners)
        self._of = {
            event: [one for one in self.all if getattr(type(one), event) is not nothing]
            for event, nothing in vars(StepListener).items()
            if not event.startswith("_")
        }

    def notify(self, event: str, *args: Any) -> None:
        """Call an event of all listeners that override it.

        Args:
            event: Name of the StepListener method.
            *args: Its arguments.
        """
        for one in self._of[event]:
            getattr(one, event)(*args)

    def callback(self, event: str, step: int, bucket: BucketView) -> Callable | None:
        """Combine the functions that listeners want to be called with a gradient.

        Args:
            event: "gradient_callback" or "compensated_gradient_callback".
            step: Number of the step.
            bucket: The bucket.

        Returns:
            One function for all of them; None if there are none.
        """
        found = [call for one in self._of[event] if (call := getattr(one, event)(step, bucket))]
        if len(found) < 2:
            return found[0] if found else None
        return lambda gradient, residual: [call(gradient, residual) for call in found]

    def wrap(self, transport: Transport) -> Transport:
        """Let all listeners wrap the exchange's transport.

        Args:
            transport: The transport.

        Returns:
            The wrapped transport.
        """
        for one in self._of["wrap_transport"]:
            transport = one.wrap_transport(transport)
        return transport

    def transport_of(self, step: int, bucket: BucketView, transport: Transport) -> Transport:
        """Let all listeners wrap the transport of a bucket in a step.

        Args:
            step: Number of the step.
            bucket: The bucket.
            transport: The exchange's transport.

        Returns:
            The wrapped transport.
        """
        for one in self._of["bucket_transport"]:
            transport = one.bucket_transport(step, bucket, transport)
        return transport

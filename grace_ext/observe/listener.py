"""What looks on at an exchange's steps, and may decide between them what the next ones do."""

from collections.abc import Callable, Sequence

from ..communicators.base import Pending
from ..transport.base import Transport


class StepListener:
    """The events of a step, in the order in which they come. Here none of them does anything.

    Buckets are grace_ext.exchange.buckets.Bucket. The engine calls a listener on every rank in the same order, so it may use
    collectives in `end_step`, and in no other event. Events of one bucket may come from the worker thread; those of a step
    come from the caller's.
    """

    def wrap_transport(self, transport: Transport) -> Transport:
        """Once, when the exchange is made. Returns the transport that it is to use."""
        return transport

    def signature(self) -> tuple:
        """What of it has to be the same on all ranks, for the digest of the configuration."""
        return ()

    def buckets_set(self, buckets: list) -> None:
        """Between steps: the exchange has these buckets from now on. Raises ConfigError for what does not fit together."""

    def started_together(self, bucket) -> list[str]:
        """Names of the buckets without which the collective of this one does not start in this step."""
        return []

    def step_started(self) -> None:
        """Before the first bucket of a step."""

    def gradient_callback(self, step: int, bucket) -> Callable | None:
        """Returns a function (gradient, residual or None), to be called before the bucket is encoded; None if there is
        nothing to see in this step."""

    def compensated_gradient_callback(self, step: int, bucket) -> Callable | None:
        """The same, of what the memory has made of the gradient."""

    def bucket_transport(self, step: int, bucket, transport: Transport) -> Transport:
        """Returns the transport that the bucket is to start with."""
        return transport

    def bucket_failed(self, bucket, error: BaseException) -> None:
        """The bucket could not be encoded or sent: in this step nothing comes of it."""

    def receiving(self, step: int, bucket, pending: Pending) -> None:
        """Before the bucket is advanced or finished."""

    def received(self, step: int, bucket, pending: Pending) -> None:
        """After that."""

    def bucket_finished(self, step: int, bucket, pending: Pending) -> None:
        """The sum over ranks is there."""

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        """All buckets are finished, nothing is under way, and the states of the next step are in force.

        Args:
            finite: whether every rank's gradient was.
            report: gives the step's part of Exchange.stats.
        """

    def abort(self) -> None:
        """The step is given up."""

    def stats(self) -> dict:
        """Its part of Exchange.stats."""
        return {}


class Listeners:
    """Several of them; an event goes to those that have something to do with it, in their order."""

    def __init__(self, listeners: Sequence[StepListener]):
        self.all = tuple(listeners)
        self._of = {
            event: [one for one in self.all if getattr(type(one), event) is not nothing]
            for event, nothing in vars(StepListener).items()
            if not event.startswith("_")
        }

    def notify(self, event: str, *args) -> None:
        for one in self._of[event]:
            getattr(one, event)(*args)

    def callback(self, event: str, step: int, bucket) -> Callable | None:
        """One function for all that `gradient_callback` or `compensated_gradient_callback` returns."""
        found = [call for one in self._of[event] if (call := getattr(one, event)(step, bucket))]
        if len(found) < 2:
            return found[0] if found else None
        return lambda gradient, residual: [call(gradient, residual) for call in found]

    def wrap(self, transport: Transport) -> Transport:
        for one in self._of["wrap_transport"]:
            transport = one.wrap_transport(transport)
        return transport

    def transport_of(self, step: int, bucket, transport: Transport) -> Transport:
        for one in self._of["bucket_transport"]:
            transport = one.bucket_transport(step, bucket, transport)
        return transport

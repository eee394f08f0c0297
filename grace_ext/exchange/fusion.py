"""Several small buckets' containers in one allgather; memories' sketches and small float32 buckets with the containers of others.

A collective costs more than such bytes do.

As Horovod's tensor fusion (Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018,
section 4), but which buckets go together does not depend on when they are ready.
"""

import concurrent.futures
from collections.abc import Callable, Sequence

import numpy as np

from ..communicators.base import Pending
from ..errors import ContainerError, ExchangeError
from ..observe.listener import BucketView, StepListener
from ..transport.base import CollectiveHandle, Transport, TransportWrapper
from .buckets import sketch_name

MOST_BYTES = 32 * 1024  # of a rank's containers in one collective
_MOST_FLOAT32 = 128 * 1024  # bytes of a float32 bucket that goes with containers
_AGAIN = 100  # steps after which the groups are formed anew


def goes_with_containers(transport: Transport, elements: int) -> bool:
    """Say whether a float32 bucket goes with the containers of other buckets, and not by an allreduce of its own.

    It does if few bytes more leave a rank then than in a ring's allreduce: none with two ranks.

    Args:
        transport: The transport of the exchange.
        elements: Number of elements of the bucket.

    Returns:
        Whether it does, the same on all ranks.
    """
    ranks = transport.size
    more = 4 * elements * (ranks - 1) * (ranks - 2) / ranks
    return transport.can_fuse and 4 * elements <= _MOST_FLOAT32 and more <= MOST_BYTES


class Fusion(StepListener):
    """Groups the buckets of an exchange.

    All ranks receive the same containers, so they form the same groups without telling each other.

    Args:
        transport: The exchange's transport.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self.buckets_set([])

    def buckets_set(self, buckets: Sequence[BucketView]) -> None:
        self._buckets = buckets if self._transport.can_fuse else []
        self._sketches = {bucket.name for bucket in self._buckets if bucket.memory.sketch_size(len(bucket.tensors))}
        self._received: dict[str, int] = {}  # the most bytes of a step by bucket, since groups were formed
        self._received_in_step: dict[str, int] = {}
        self._groups: list[list] = []
        self._open: dict[str, _Group] = {}
        self._steps = 0

    def step_started(self) -> None:
        # Buckets that do not send containers in this step are left out of their group.
        grouped = {bucket.name for buckets in self._groups for bucket in buckets}
        for buckets in [*self._groups, *([bucket] for bucket in self._buckets if bucket.name not in grouped)]:
            names = [bucket.name for bucket in buckets if bucket.communicator.sends_containers]
            payloads = [
                part for name in names for part in ((name, sketch_name(name)) if name in self._sketches else (name,))
            ]
            if len(payloads) > 1:
                self._open.update(dict.fromkeys(names, _Group(self._transport.size, payloads)))

    def started_together(self, bucket: BucketView) -> list[str]:
        group = self._open.get(bucket.name)
        return [name for name, other in self._open.items() if other is group] if group else []

    def bucket_transport(self, step: int, bucket: BucketView, transport: Transport) -> Transport:
        group = self._open.get(bucket.name)
        return FusedTransport(transport, group) if group else transport

    def bucket_finished(self, step: int, bucket: BucketView, pending: Pending) -> None:
        if pending.received is not None:
            self._received_in_step[bucket.name] = pending.received

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        self._open = {}
        for name, received in self._received_in_step.items():
            self._received[name] = max(received, self._received.get(name, 0))
        self._received_in_step = {}
        if finite:
            if self._steps % _AGAIN == 0:
                self._regroup()
            self._steps += 1

    def _regroup(self) -> None:
        """Put neighbours into one group while a rank's containers are, on average, few enough bytes for one collective.

        A bucket of float32 joins the next one, whatever the bytes: its gradients are those of all layers, so that it is ready
        with the last of the others.
        """
        self._groups, total, float32 = [], 0, []
        most = MOST_BYTES * self._transport.size
        for bucket in self._buckets:
            size = self._received.get(bucket.name)
            if size is None:
                continue
            if bucket.compressor.exact:
                float32.append(bucket)
                continue
            if not self._groups or total + size > most:
                self._groups.append([])
                total = 0
            self._groups[-1] += [*float32, bucket]
            total, float32 = total + size, []
        if float32:
            self._groups[-1:] = [[*(self._groups[-1] if self._groups else []), *float32]]
        self._received = {}

    def bucket_failed(self, bucket: BucketView, error: BaseException) -> None:
        if group := self._open.get(bucket.name):
            group.fail(error)

    def abort(self) -> None:
        for group in self._open.values():
            group.fail(ExchangeError("the step was given up before all of a collective's buckets were there"))
        self._open, self._received_in_step = {}, {}  # not all ranks have finished the same buckets


class FusedTransport(TransportWrapper):
    """The transport of one bucket of a group.

    Args:
        transport: The transport that carries the group's collective.
        group: The group.
    """

    def __init__(self, transport: Transport, group: "_Group"):
        super().__init__(transport)
        self._group = group

    def allgather(self, name: str, payload: np.ndarray) -> CollectiveHandle:
        if name not in self._group.names:
            return self._transport.allgather(name, payload)
        self._group.add(self._transport, name, payload)
        return self._group.handle_of(name)


class _Group:
    """Payloads that go in one allgather: containers by the names of their buckets, and sketches."""

    def __init__(self, ranks: int, names: list[str]):
        self.names = names
        self._ranks = ranks
        self._payloads: dict[str, np.ndarray] = {}
        self._sent: concurrent.futures.Future = concurrent.futures.Future()
        self._parts: dict[str, np.ndarray] | None = None

    def add(self, transport: Transport, name: str, payload: np.ndarray) -> None:
        """Add a bucket's payload. The last one sends all: their lengths, then the payloads in the order of the names."""
        self._payloads[name] = payload.copy()
        if len(self._payloads) == len(self.names):
            payloads = [self._payloads[name] for name in self.names]
            lengths = np.array([one.size for one in payloads], "<u4").view(np.uint8)
            try:
                handle = transport.allgather(f"{self.names[0]}.fused", np.concatenate([lengths, *payloads]))
            except BaseException as error:
                self.fail(error)  # otherwise the other buckets would wait for ever
                raise
            self._sent.set_result(handle)

    def fail(self, error: BaseException) -> None:
        if not self._sent.done():
            self._sent.set_exception(error)

    def handle_of(self, name: str) -> CollectiveHandle:
        """Return the handle of the payloads of that name, joined in the order of ranks.

        What this rank sends beside payloads counts as the padding of the handle that is waited for first.
        """

        def wait() -> np.ndarray:
            if self._parts is None:
                sent = self._sent.result()
                self._parts = self._split(sent.wait())
                handle.padding = 4 * len(self.names) + sent.padding
            return self._parts[name]

        handle = CollectiveHandle(wait, self._poll)
        return handle

    def _poll(self) -> bool | None:
        if self._parts is not None:
            return True
        return self._sent.result().poll() if self._sent.done() and not self._sent.exception() else None

    def _split(self, data: np.ndarray) -> dict[str, np.ndarray]:
        parts: dict[str, list] = {name: [] for name in self.names}
        head = 4 * len(self.names)
        for rank in range(self._ranks):
            lengths = data[:head].copy().view("<u4").tolist() if data.size >= head else []
            if not lengths or head + sum(lengths) > data.size:
                raise ContainerError(
                    f"{self.names[0]!r}: rank {rank} sent {data.size} bytes, too few for {len(self.names)} "
                    f"buckets of the lengths {lengths}"
                )
            data = data[head:]
            for name, length in zip(self.names, lengths, strict=True):
                parts[name].append(data[:length])
                data = data[length:]
        if data.size:
            raise ContainerError(f"{self.names[0]!r}: {data.size} bytes follow the containers of all ranks")
        return {name: np.concatenate(payloads) for name, payloads in parts.items()}

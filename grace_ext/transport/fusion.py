"""Several small buckets' containers in one allgather, where a collective costs more than their bytes.

As Horovod's tensor fusion (Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018,
section 4), but which buckets go together does not depend on when they are ready.
"""

import concurrent.futures

import numpy as np

from ..errors import ContainerError, ExchangeError
from .base import Transport, has_arrived

MOST = 32 * 1024  # bytes of a rank's containers that go together
_AGAIN = 100  # steps after which groups are made once more


class Fusion:
    """Of one exchange. All ranks receive the same containers, so they make the same groups without a word about it."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._received: dict[str, int] = {}
        self._groups: list[list] = []
        self._open: dict[str, _Group] = {}
        self._steps = 0

    def begin(self) -> None:
        """A step. Buckets that do not send containers in it are left out of their group."""
        for buckets in self._groups:
            names = [bucket.name for bucket in buckets if bucket.communicator.sends_containers]
            if len(names) > 1:
                self._open.update(dict.fromkeys(names, _Group(self._transport, names)))

    def together(self, bucket) -> list[str]:
        """The names of all that go together with a bucket in this step, its own as well."""
        group = self._open.get(bucket.name)
        return group.names if group else [bucket.name]

    def transport_of(self, bucket) -> Transport:
        group = self._open.get(bucket.name)
        return Member(self._transport, group) if group else self._transport

    def received(self, bucket, size: int) -> None:
        """How many bytes of containers came from all ranks together."""
        self._received[bucket.name] = max(size, self._received.get(bucket.name, 0))

    def end_step(self, finite: bool, buckets: list) -> None:
        self._open = {}
        if finite:
            if self._steps % _AGAIN == 0:
                self._regroup(buckets)
            self._steps += 1

    def _regroup(self, buckets) -> None:
        """Neighbours share a collective as long as a rank's containers are not too many bytes for one, on average."""
        self._groups, total = [], 0
        most = MOST * self._transport.size
        for bucket in buckets:
            size = self._received.get(bucket.name)
            if size is None:
                continue
            if not self._groups or total + size > most:
                self._groups.append([])
                total = 0
            self._groups[-1].append(bucket)
            total += size
        self._received = {}

    def fail(self, bucket, error: BaseException) -> None:
        """It has nothing to send, and never will in this step."""
        if group := self._open.get(bucket.name):
            group.fail(error)

    def abort(self) -> None:
        for group in self._open.values():
            group.fail(ExchangeError("the step was given up before all of a collective's buckets were there"))
        self._open = {}


class Member(Transport):
    """What one bucket of a group starts with."""

    def __init__(self, transport: Transport, group: "_Group"):
        self._transport, self._group = transport, group
        self.rank, self.size, self.hosts = transport.rank, transport.size, transport.hosts

    def allgather(self, name, payload):
        self._group.add(name, payload)
        return _Part(self._group, name)


class _Group:
    def __init__(self, transport: Transport, names: list[str]):
        self.names = names
        self._transport = transport
        self._payloads: dict[str, np.ndarray] = {}
        self._sent: concurrent.futures.Future = concurrent.futures.Future()
        self._parts: dict[str, np.ndarray] | None = None

    def add(self, name: str, payload: np.ndarray) -> None:
        """The last one sends them all: their lengths, then the payloads in the order of the names."""
        self._payloads[name] = payload.copy()
        if len(self._payloads) == len(self.names):
            payloads = [self._payloads[name] for name in self.names]
            lengths = np.array([one.size for one in payloads], "<u4").view(np.uint8)
            try:
                handle = self._transport.allgather(f"{self.names[0]}.fused", np.concatenate([lengths, *payloads]))
            except BaseException as error:
                self.fail(error)  # the other buckets would wait for it
                raise
            self._sent.set_result(handle)

    def fail(self, error: BaseException) -> None:
        if not self._sent.done():
            self._sent.set_exception(error)

    def arrived(self) -> bool | None:
        if self._parts is not None:
            return True
        return has_arrived(self._sent.result()) if self._sent.done() and not self._sent.exception() else None

    def part(self, name: str) -> tuple[np.ndarray, int]:
        """The payloads of that name, joined in the order of ranks; and how many bytes this rank sent beside payloads, said
        once."""
        padding = 0
        if self._parts is None:
            handle = self._sent.result()
            self._parts = self._split(handle.wait())
            padding = 4 * len(self.names) + getattr(handle, "padding", 0)
        return self._parts[name], padding

    def _split(self, data: np.ndarray) -> dict[str, np.ndarray]:
        parts: dict[str, list] = {name: [] for name in self.names}
        head = 4 * len(self.names)
        for rank in range(self._transport.size):
            lengths = data[:head].copy().view("<u4").tolist() if data.size >= head else []
            if not lengths or head + sum(lengths) > data.size:
                raise ContainerError(f"{self.names[0]!r}: rank {rank} sent {data.size} bytes, too few for {len(self.names)} "
                                     f"buckets of the lengths {lengths}")
            data = data[head:]
            for name, length in zip(self.names, lengths, strict=True):
                parts[name].append(data[:length])
                data = data[length:]
        if data.size:
            raise ContainerError(f"{self.names[0]!r}: {data.size} bytes follow the containers of all ranks")
        return {name: np.concatenate(payloads) for name, payloads in parts.items()}


class _Part:
    def __init__(self, group: _Group, name: str):
        self._group, self._name = group, name
        self.padding = 0

    def poll(self) -> bool | None:
        return self._group.arrived()

    def wait(self) -> np.ndarray:
        part, self.padding = self._group.part(self._name)
        return part

"""The collectives of grace_ext over a process group of PyTorch's Gloo, among ranks of Horovod.

Before each of its collectives, Horovod's ranks tell each other in a cycle what is ready, and its allgather is a ring: over links
with latency this takes several times as long as what is sent. Containers do not need it, since all ranks send the same buckets
in the same order.
"""

import datetime
import functools
import struct

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from horovod.common.exceptions import HorovodInternalError

from grace_ext import ExchangeError
from grace_ext.transport import CollectiveHandle

from .._common.addresses import agree_on_addresses
from .c10d_transport import C10dTransport
from .gloo_exit import wait_at_exit
from .hvd_transport import HorovodTransport

#: All groups, until the process ends, as torch.distributed keeps its own. Python frees a group while it holds the interpreter lock, and
#: waits for the group's threads then; one of these may want that lock to drop a tensor, and both would wait for ever (torch 2.13).
_groups: list[dist.ProcessGroupGloo] = []
#: How long a rank waits for another one that has not ended, as with torch.distributed, and to connect.
_PATIENCE, _TO_CONNECT = datetime.timedelta(minutes=30), datetime.timedelta(minutes=2)


class GlooTransport(C10dTransport):
    """Over a group of Gloo of its own among the ranks of a process set, which connect with their first collective.

    Args:
        process_set: The process set; this rank is one of its ranks.
        prefix: What the names of the collectives begin with by which the ranks find each other.
    """

    def __init__(self, process_set: hvd.ProcessSet, prefix: str):
        super().__init__(process_set.rank(), process_set.size(), hvd.rank(), torch.device("cpu"))
        self._horovod, self._prefix = HorovodTransport(process_set), prefix

    @functools.cached_property
    def group(self) -> dist.ProcessGroupGloo:
        """The group. A collective when it is read for the first time."""
        wait_at_exit()
        addresses = agree_on_addresses(self._horovod, f"{self._prefix}.gloo")
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=addresses[self.rank])]
        options._timeout = _PATIENCE
        _groups.append(dist.ProcessGroupGloo(self._store(addresses[0]), self.rank, self.size, options))
        return _groups[-1]

    def connect(self) -> None:
        """Make the group now: a collective.

        Raises:
            ExchangeError: Some rank reaches none of the addresses of the first one; on all ranks.
            RuntimeError: This rank cannot connect to another one.
        """
        self.group  # noqa: B018

    def _store(self, address: str) -> dist.Store:
        """Where the ranks say how to connect to them. address: of the first, which has it."""

        def store(port: int) -> dist.TCPStore:
            return dist.TCPStore(address, port, self.size, self.rank == 0, _TO_CONNECT, wait_for_workers=False)

        own, failed = None, b""
        if self.rank == 0:
            try:
                own = store(0)
            except Exception as error:
                failed = repr(error).encode()  # longer than a port
        answer = struct.pack("<I", own.port) if own else failed
        answer = self._horovod.allgather(f"{self._prefix}.gloo.port", np.frombuffer(answer, np.uint8)).wait().tobytes()
        if len(answer) != 4:
            raise ExchangeError(f"rank 0 cannot open a port for the ranks to find each other: {answer.decode()}")
        return own or store(*struct.unpack("<I", answer))

    def _under_way(
        self, work: dist.Work, result: torch.Tensor, *sent: torch.Tensor, stays: bool = False
    ) -> CollectiveHandle:
        """Raises, when it is waited for, what Horovod's own collectives raise where another rank has failed."""
        handle = super()._under_way(work, result, *sent, stays=stays)

        def wait() -> np.ndarray | torch.Tensor:
            try:
                return handle.wait()
            except RuntimeError as error:
                raise HorovodInternalError(f"another rank, or the link to it, has failed: {error}") from error

        return CollectiveHandle(wait)

    def sum_tensor(self, name: str, tensor: torch.Tensor, prescale: float, postscale: float) -> CollectiveHandle:
        """See HorovodTransport: gradients of an accelerator that bypass the exchange go by what Horovod was built with for it."""
        return self._horovod.sum_tensor(name, tensor, prescale, postscale)

"""Tables whose gradients come as rows on an accelerator: summed and encoded there. It imports Triton."""

import time
from collections.abc import Callable
from typing import Any

from grace_ext._util.rng import Stream
from grace_ext.communicators.base import Communicator, Pending
from grace_ext.exchange.row_buckets import RowBucket, RowGradient, TouchedRows
from grace_ext.memory import Memory
from grace_ext.pipeline.compressor import Compressor
from grace_ext.transport.base import Transport

from . import device_encoder
from .device import TorchBucket
from .device_place import DevicePlace
from .kernels import on_device, rows
from .mailbox import to_device, to_host


class DeviceRowBucket(TorchBucket, RowBucket):
    """A table whose touched rows are summed and encoded where they are.

    The numbers of the rows cross, and the container. The host sums what the ranks have sent, and uploads the rows of the result.
    """

    place = DevicePlace

    @classmethod
    def fits(cls, compressor: Compressor, communicator: Communicator, memory: Memory) -> bool:
        return device_encoder.fits(compressor) and not memory.has_hooks

    def _start(
        self, transport: Transport, pack: Callable[[], RowGradient], stream: Stream, *observers: Callable | None
    ) -> Pending:
        """pack: returns a RowGradient with tensors of the device. observers: not called, as those of a RowBucket."""
        started = time.perf_counter()
        given: Any = pack()
        indices = to_host(given.indices)
        self.check_rows(indices, given.values.numel())
        touched, order, starts = rows.group(indices)
        state = self.memory.begin_rows(self.name, self.size, touched, self.width, self._arrays)
        summed = self._arrays.empty(touched.size * self.width) if state is None else state[1]
        with on_device(self.device):
            rows.sum_into(
                summed, given.values.reshape(-1, self.width), to_device(order, self.device), to_device(starts, self.device)
            )
        taken = time.perf_counter() - started
        touched_rows = TouchedRows(self.compressor, touched, self.size)
        pending = self.communicator.start(transport, self.name, touched_rows, summed, state, stream)
        pending.seconds["rows"] = taken
        pending.gradient_bytes = indices.nbytes + 4 * given.values.numel()
        return pending

    def _finish(self, pending: Pending, transport: Transport, out: Any, weight: float) -> bool:
        return RowBucket.finish(self, pending, transport, out, weight)

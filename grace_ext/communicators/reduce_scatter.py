"""Communicator `reduce_scatter`, for adapters that shard gradients."""

import dataclasses
import time
from typing import Any

import numpy as np

from .._util.numerics import non_finite_allowed
from .._util.rng import Stream
from ..pipeline import container
from ..pipeline.compressor import Compressor
from ..transport.base import Transport
from ._compressed_sums import NO_BYTES, parse_containers
from .base import Communicator, Pending, wait
from .places import Placed
from .slices import equal_slices, sizes_in_slice, stream_of_slice


@dataclasses.dataclass
class _PendingScatter(Pending):
    """An exchange under way. name: of the bucket. finite: whether this rank's gradient is."""

    name: str
    finite: bool


class ReduceScatter(Placed, Communicator[_PendingScatter]):
    """Every rank owns a slice of the gradient, and gets the sum of that slice only.

    The vector of a bucket has the slices of the other ranks, in their order, all of the same size. What a rank has of its own
    slice never leaves it and stays exact: `finish` finds it in `out`, which has the size of a slice. One alltoall carries the
    containers. If a gradient is not finite anywhere, all ranks learn of it, though each gets one slice only.

    It is no choice for buckets whose result is a whole gradient, so no spec names it.

    Source:
        The reduce-scatter of ZeRO (Rajbhandari et al., SC 2020) with compressed slices in an alltoall, as in Wang et al.,
        ZeRO++, 2023, section 3.3.
    """

    name = "reduce_scatter"
    collectives = ("alltoall",)
    reports_support = False

    def wire_copies(self, transport: Transport) -> float:
        return 1.0

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: Any,
        state: tuple | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> _PendingScatter:
        sizes = (len(gradient),) if sizes is None else sizes
        pending = _PendingScatter(None, 0, {}, name=name, finite=True)
        payloads = [NO_BYTES] * transport.size
        owners = [rank for rank in range(transport.size) if rank != transport.rank]
        for owner, part in zip(owners, equal_slices(len(gradient), len(owners)), strict=True):
            residual = state and (state[0][part], state[1][part])
            inside = sizes_in_slice(sizes, part)
            encoded = self.place.encode(
                compressor, gradient[part], stream_of_slice(stream, owner), state=residual, sizes=inside
            )
            pending.add_seconds(encoded.seconds)
            pending.index_codecs += [encoded.index_codec] if encoded.index_codec else []
            pending.finite &= not encoded.non_finite
            payloads[owner] = encoded.blob
        if not pending.finite:
            for owner in owners:
                payloads[owner] = container.pack_non_finite(len(gradient) // len(owners))
        joined = np.concatenate(payloads)
        pending.handle = transport.alltoall(f"{name}.slices", joined, [payload.size for payload in payloads])
        pending.wire_bytes = joined.size
        return pending

    def finish(self, pending: _PendingScatter, transport: Transport, out: Any, weight: float) -> bool:
        """See Communicator.finish, but for `out`.

        Args:
            pending: See Communicator.finish.
            transport: See Communicator.finish.
            out: float32[size of a slice]: this rank's own part of its slice, which becomes weight * (sum over ranks).
            weight: See Communicator.finish.

        Returns:
            See Communicator.finish; then `out` is NaN.
        """
        received = wait(pending)
        started = time.perf_counter()
        containers = parse_containers(pending.name, received, [len(out)] * (transport.size - 1))
        finite = pending.finite and not any(one.non_finite for one in containers)
        if finite:
            self.place.add_all(containers, out)
            if weight != 1:
                with non_finite_allowed():
                    out *= float(weight)
        else:
            out[:] = np.nan
        pending.add_seconds({"decode": time.perf_counter() - started})
        return finite

"""What the communicators have in common whose ranks sum containers on the way and compress the sum."""

import dataclasses
import time
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError, ContainerError, ExchangeError
from ..pipeline import container
from ..pipeline.compressor import Compressor, make_compressor
from ..pipeline.container import Container
from .base import Communicator, Pending, PendingType
from .places import HOST, Place, Placed

#: The first byte of the report that some rank could not read what it got. No container begins with it.
_UNREADABLE = 0
#: What a rank sends that has nothing to send.
NO_BYTES = np.empty(0, np.uint8)


@dataclasses.dataclass
class InFlightSum(Pending):
    """An exchange under way. place: where its arrays lie. unreadable: what was wrong with the containers that this rank got."""

    keeps_state = True
    name: str
    compressor: Compressor
    stream: Stream
    place: Place = dataclasses.field(default=HOST, kw_only=True)
    unreadable: ContainerError | ExchangeError | None = dataclasses.field(default=None, kw_only=True)

    def encode(self, gradient: Any, state: tuple | None, stream: Stream, sizes: tuple[int, ...] | None) -> np.ndarray:
        """Return the container of float32[n], and count its cost.

        state: (residual, buffer for the next one), both float32[n], or None.
        """
        return self._counted(self.place.encode(self.compressor, gradient, stream, state=state, sizes=sizes))

    def encode_sum(self, summed: Any, keep: bool, stream: Stream, sizes: tuple[int, ...] | None) -> np.ndarray:
        """Return the container of float32[n], and count its cost.

        keep: whether to leave in `summed` what the container does not carry.
        """
        if keep:
            return self._counted(self.place.encode_in_place(self.compressor, summed, stream, sizes=sizes))
        return self.encode(summed, None, stream, sizes)

    def _counted(self, encoded: Any) -> np.ndarray:
        self.add_seconds(encoded.seconds)
        if encoded.index_codec:
            self.index_codecs.append(encoded.index_codec)
        return encoded.blob

    def decode_slices(
        self, data: np.ndarray, slices: list[slice], out: Any, weight: float, containers_each: int = 1
    ) -> bool:
        """Write weight * (sum of each slice's containers) to out, float32[d] or vectors that together are it; count the time.

        data: uint8[m], the containers of the slices, one after the other, `containers_each` of every slice. Returns whether
        all of them are finite; otherwise all of `out` is NaN. Raises what was wrong here or on another rank.
        """
        if self.unreadable is not None:
            raise self.unreadable
        started = time.perf_counter()
        sizes = [part.stop - part.start for part in slices for _ in range(containers_each)]
        containers = parse_containers(self.name, data, sizes)
        finite = not any(one.non_finite for one in containers)
        if finite:
            groups = [containers[at : at + containers_each] for at in range(0, len(containers), containers_each)]
            self.place.decode_slices(list(zip(slices, groups, strict=True)), out, weight)
        else:
            for vector in out if isinstance(out, list) else [out]:
                vector[:] = np.nan
        self.add_seconds({"decode": time.perf_counter() - started})
        return finite


class SummingCommunicator(Placed, Communicator[PendingType]):
    """Compresses sums of what was compressed.

    A rank that has joined the others has no gradient and compresses a sum without loss, because its memory must not change.
    """

    reports_support = False

    def check(self, compressor: Compressor) -> None:
        super().check(compressor)
        if compressor.unbiased:
            raise ConfigError(
                f"communicator {self.name!r} compresses sums once more and would scale up twice what "
                f"{str(compressor.sparsifier)!r} selects: use unbiased=false, or allgather or allreduce"
            )


def lossless_compressor() -> Compressor:
    """Return the compressor for ranks that have joined."""
    return make_compressor("nonzero")


def report_unreadable(rank: int) -> np.ndarray:
    """Return the message of a rank that could not read what it got. The others wait for it, so it has to be sent."""
    return np.frombuffer(bytes([_UNREADABLE]) + rank.to_bytes(4, "little"), np.uint8).copy()


class UnreadableContainers(ExchangeError):
    """A rank reported that it could not read what it got."""

    def __init__(self, name: str, rank: int):
        super().__init__(f"{name!r}: rank {rank} got something other than the containers that it was to sum up")
        self.rank = rank


def check_readable(name: str, data: np.ndarray) -> None:
    """Raise UnreadableContainers if data, uint8[m], begins with the report of a rank."""
    if data.size >= 5 and data[0] == _UNREADABLE:
        raise UnreadableContainers(name, int.from_bytes(data[1:5].tobytes(), "little"))


def parse_containers(name: str, data: np.ndarray, sizes: list[int]) -> list[Container]:
    """Parse the containers that stand one after the other in uint8[m]; `sizes` are their numbers of elements.

    Raises ContainerError, and UnreadableContainers if a report stands in their place or behind them.
    """
    found = []
    for size in sizes:
        check_readable(name, data)
        found.append(container.parse(data, size, prefix=True))
        data = data[found[-1].nbytes :]
    check_readable(name, data)
    if data.size:
        raise ContainerError(f"{data.size} bytes follow the {len(sizes)} containers")
    return found

"""How large buckets should be, by what the first steps of a run have shown.

While backward goes on, the containers of buckets that are complete are on their way. So the smaller the last bucket, the less is left
to send when backward ends. But each bucket takes time of its own, and as much of its link as a collective needs whatever its bytes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from . import cost_model

#: Float32 bytes after which a bucket is closed, among which is chosen.
SIZES = tuple(25 * 2**20 // 2**halvings for halvings in range(4))
#: Models of fewer bytes keep the largest of SIZES, because they have little to send.
LEAST = 2**23
#: Models of more bytes keep it because their last bucket is a small part of them, and other buckets would need a copy of the memory.
MOST = 2**27
#: Seconds of the processor for one bucket more: docs/benchmarks.md#where-the-time-of-a-step-goes has 0.7 to 1.1 ms.
_OF_A_BUCKET = 1e-3
_WORTH = 0.05  # of a step, which the choice has to save


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a rank has measured in its first steps, with one size of buckets.

    Attributes:
        backward: Seconds from the first gradient to the end of backward.
        encode: Seconds to encode an element.
        decode: Seconds to decode an element of all ranks.
        bytes_sent: Container bytes of an element.
        has_spare_core: Whether a worker thread has a core of its own while backward goes on. If not, what it does then makes
            backward longer.
    """

    backward: float
    encode: float
    decode: float
    bytes_sent: float
    has_spare_core: bool


def seconds_of(buckets: Sequence[tuple[float, int]], measured: Measured, link: cost_model.Link, ranks: int) -> float:
    """Predict the seconds from the first gradient to the last result, with communicator allgather.

    Args:
        buckets: Of each, the seconds from the first gradient until it is complete, and its number of elements.
        measured: What was measured.
        link: The cost of an allgather.
        ranks: Number of ranks.

    Returns:
        Seconds.
    """
    work = encoded = arrived = 0.0
    for ready, elements in sorted(buckets):
        begun = max(encoded, ready if measured.has_spare_core else ready + work)
        seconds = _OF_A_BUCKET + measured.encode * elements
        encoded, work = begun + seconds, work + seconds
        wire = cost_model.ring_allgather([measured.bytes_sent * elements] * ranks)
        arrived = max(encoded, arrived) + link.seconds(wire.rounds, wire.path)
    backward = measured.backward if measured.has_spare_core else measured.backward + work
    # With a core to spare, all others are decoded while the last one is on its way.
    left = sorted(buckets)[-1:] if measured.has_spare_core else buckets
    return max(arrived, backward) + measured.decode * sum(elements for _, elements in left)


def choose_size(
    layouts: Mapping[int, Sequence[tuple[float, int]]], measured: Measured, link: cost_model.Link, ranks: int
) -> int:
    """Choose the size of buckets with which a step is shortest.

    Args:
        layouts: By size, the buckets that there would be: see `seconds_of`. The largest size is the one in force.
        measured: What was measured.
        link: The cost of an allgather.
        ranks: Number of ranks.

    Returns:
        One of the sizes: the largest one, unless another saves 5 % of the time from the first gradient to the last result.
    """
    seconds = {size: seconds_of(buckets, measured, link, ranks) for size, buckets in layouts.items()}
    best = min(sorted(seconds, reverse=True), key=lambda size: seconds[size])
    largest = max(seconds)
    return best if seconds[best] < (1 - _WORTH) * seconds[largest] else largest

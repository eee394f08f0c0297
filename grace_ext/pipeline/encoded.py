"""The result of encoding, and the clock that times its stages."""

import dataclasses
import time
from typing import Any

import numpy as np

from .._util.scratch import scratch
from ..kernels import write_error
from .decoder import reorder


@dataclasses.dataclass
class Encoded:
    """A container and what the sender knows about it.

    The arrays `support`, `values` and `decoded` lie in scratch arrays: valid until this thread encodes or decodes again.

    Attributes:
        blob: The container, uint8[m].
        support: The positions that are sent, uint32[k]; None for all positions, and in a non-finite container.
        values: The gradient at the support, float32[k]; None in a non-finite container.
        decoded: What receivers decode at the support, float32[k]; None in a non-finite container.
        index_bytes: Bytes of the index section.
        value_bytes: Bytes of the value section.
        seconds: Time that each stage took.
        index_codec: Name of the codec that wrote the index section; None without such a section.
    """

    blob: np.ndarray
    support: np.ndarray | None
    values: np.ndarray | None
    decoded: np.ndarray | None
    index_bytes: int
    value_bytes: int
    seconds: dict[str, float]
    index_codec: str | None = None

    @property
    def non_finite(self) -> bool:
        """Whether the gradient held a NaN or an Inf, so that the container holds no values."""
        return self.values is None

    def write_remainder(self, pending: np.ndarray) -> None:
        """Leave in an array what the container does not carry; the time is counted as that of the stage "residual".

        Args:
            pending: float32[d], what was encoded, without a transform; overwritten, but not by a non-finite container.
        """
        started = time.perf_counter()
        if not self.non_finite:
            if self.support is None:
                np.subtract(self.values, self.decoded, out=pending)
            else:
                write_error(pending, self.support, self.values, self.decoded)
        self.seconds["residual"] = self.seconds.get("residual", 0.0) + time.perf_counter() - started


class StageClock:
    """Measures how long each stage takes.

    Args:
        started: When the first stage began, in seconds of time.perf_counter; None for now.
    """

    def __init__(self, started: float | None):
        self.last = time.perf_counter() if started is None else started
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """End a stage: the time since the one before is counted as its own.

        Args:
            stage: Name of the stage.
        """
        now = time.perf_counter()
        self.seconds[stage], self.last = now - self.last, now


def as_received(values: np.ndarray, codec: Any, section: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Return what receivers decode of a sender's values: these themselves if nothing is lost, else a scratch array.

    Args:
        values: float32[k].
        codec: The value codec that has encoded them.
        section: The section that it wrote, uint8[m].
        order: The order of the values in it, uint32[k], or None.

    Returns:
        float32[k], in the order of the support.
    """
    if codec.lossless or not values.size:
        return values
    decoded = scratch("decoded", np.float32, values.size)
    codec.decode(section, decoded)
    return reorder(decoded, order)

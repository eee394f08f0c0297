"""What the ranks tell each other before they exchange anything in a round, and what comes of it."""

import dataclasses
import logging
from typing import NamedTuple

import numpy as np

from ..errors import ExchangeError
from ..transport.base import CollectiveHandle, Transport

_LOG = logging.getLogger("grace_ext")
HEADER = np.dtype(
    [
        ("step", "<i8"),
        ("weight", "<f8"),
        ("finite", "u1"),
        ("joined", "u1"),
        ("buffers", "<u4"),
        ("step_seconds", "<f4"),
        ("exchange_seconds", "<f4"),
    ]
)


class Contribution(NamedTuple):
    """What a rank brings to a round.

    Attributes:
        weight: How much it counts, finite and not negative; 0 for nothing.
        finite: Whether its parameters and buffers were finite. If not, it contributes nothing.
        joined: Whether it has no data any more.
        buffers: Its buffers, float32[n], the same n on all ranks.
        shared_buffers: What the ranks share of them, float32[n].
        step_seconds: Seconds of each of its local steps in the round; 0 if there were none.
        exchange_seconds: Seconds of the exchange of the round before; 0 if there was none.
    """

    weight: float
    finite: bool
    joined: bool
    buffers: np.ndarray
    shared_buffers: np.ndarray
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a round, the same on all ranks but for `finite`.

    Attributes:
        finite: Whether this rank's parameters were finite.
        exchanged: Whether the ranks' pseudo-gradients have changed what they share.
        all_joined: Whether no rank has data any more.
        buffers: The mean of the ranks' buffers, float32[n], as `mean_of_rows` gives it; None if no rank contributed.
        other_bytes: Bytes that this rank has sent beside pseudo-gradients.
        step_seconds: Seconds of a local step of the slowest rank, as all ranks have told; 0 if there were none.
        exchange_seconds: Seconds of the exchange before this one on the slowest rank, as all have told; 0 if there was none.
        own_seconds: Seconds of this exchange on this rank, from the moment on at which it had the headers of all.
    """

    finite: bool
    exchanged: bool
    all_joined: bool
    buffers: np.ndarray | None
    other_bytes: int
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0
    own_seconds: float = 0.0


def start_headers(transport: Transport, name: str, step: int, own: Contribution) -> CollectiveHandle:
    """Tell all ranks what this one brings to a round: a collective.

    Args:
        transport: The transport.
        name: Name of the collective.
        step: Number of the round.
        own: What this rank brings. Its weight is sent as 0 if it is not finite.

    Returns:
        A handle of uint8[n], for `read_headers`.
    """
    weight = own.weight if own.finite else 0.0
    seconds = own.step_seconds, own.exchange_seconds
    header = np.array([(step, weight, own.finite, own.joined, own.buffers.size, *seconds)], HEADER)
    return transport.allgather(name, header.view(np.uint8))


def read_headers(received: np.ndarray, ranks: int) -> np.ndarray:
    """Read what all ranks have told.

    Args:
        received: uint8[n], what came of `start_headers`.
        ranks: The number of ranks.

    Returns:
        HEADER[ranks], in the order of ranks. A weight that is no finite number from 0 on counts as 0.

    Raises:
        ExchangeError: The ranks are in different rounds, or have different numbers of buffers; on all ranks.
    """
    if received.size != HEADER.itemsize * ranks:
        raise ExchangeError(f"{received.size} bytes are no headers of {ranks} ranks")
    headers = received.copy().view(HEADER)
    headers["weight"][~(np.isfinite(headers["weight"]) & (headers["weight"] >= 0))] = 0  # a rank that lies
    for field in ("step", "buffers"):
        if len(set(headers[field].tolist())) > 1:
            raise ExchangeError(f"the ranks differ in {field} of the round: {headers[field].tolist()}")
    return headers


def log_losses(headers: np.ndarray, step: int, exchanged: bool) -> None:
    """Warn of what was lost in a round.

    Args:
        headers: HEADER[ranks].
        step: Number of the round.
        exchanged: Whether the ranks' pseudo-gradients have changed what they share.
    """
    if not headers["finite"].all():
        _LOG.warning(
            "round %d: parameters or buffers of ranks %s were not finite; these ranks take over what the others share",
            step,
            np.flatnonzero(headers["finite"] == 0).tolist(),
        )
    elif not exchanged and headers["weight"].any():
        _LOG.warning("round %d: the sum over ranks was not finite; all ranks go back to the round before", step)

"""The report of a round."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Report:
    """What happened in a round; clients are given by their numbers.

    Attributes:
        round: Number of the round.
        taken: The clients whose updates were accepted.
        stale: Of those, the clients whose updates were late: by how many rounds.
        missing: The clients that were asked but sent nothing.
        rejected: The clients whose updates were rejected: why.
        norm: L2 norm of the mean of all updates, which the optimizer applied.
        sent: Bytes of the messages to clients.
        received: Bytes of the messages from clients.
    """

    round: int
    taken: list[int]
    stale: dict[int, int]
    missing: list[int]
    rejected: dict[int, str]
    norm: float
    sent: int
    received: int

"""A number of local steps that follows the link: as many as make exchanges a given share of the time."""

import math

from ..errors import ConfigError

_CHANGE = 2.0  # the largest factor from one round to the next, so that one slow exchange does not decide on many steps


class AutoSteps:
    """Chooses the number of local steps of each round from what exchanges and steps took in the rounds before.

    With T seconds of an exchange and t of a local step, H steps are made such that T / (T + H t) is the share. All ranks choose
    alike, by the slowest of them, which they learn from the headers of the rounds.

    Kimad keeps the time of a step and chooses what is sent in it (Xin et al., DistributedML 2023); this keeps what is sent.

    Args:
        share: The share of the time for exchanges, above 0 and below 1.
        least: The fewest steps of a round, with which training begins; at least 1.
        most: The most steps of a round. The more there are, the further ranks move apart; DiLoCo has 500.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(self, share: float = 0.1, least: int = 10, most: int = 500):
        if not 0 < share < 1:
            raise ConfigError(f"AutoSteps: share={share}; allowed: above 0 and below 1")
        if not 1 <= least <= most:
            raise ConfigError(f"AutoSteps: least={least}, most={most}; allowed: from 1 on, the least not above the most")
        self._share, self._least, self._most = share, least, most
        #: Number of local steps of the next round.
        self.steps = least

    def __repr__(self) -> str:
        return f"AutoSteps(share={self._share}, least={self._least}, most={self._most})"

    def __call__(self, number: int) -> int:
        """Give the number of local steps of a round, as a function in the place of `steps` does.

        Args:
            number: Number of the round.

        Returns:
            The number of steps.
        """
        return self.steps

    def observe(self, step_seconds: float, exchange_seconds: float) -> None:
        """Choose the number of steps of the next round.

        Args:
            step_seconds: Seconds of a local step on the slowest rank; 0 if none is known.
            exchange_seconds: Seconds of an exchange on the slowest rank; 0 if none is known.
        """
        if not (0 < step_seconds < math.inf and 0 < exchange_seconds < math.inf):
            return
        wanted = exchange_seconds * (1 - self._share) / (self._share * step_seconds)
        wanted = min(max(wanted, self.steps / _CHANGE), self.steps * _CHANGE)
        self.steps = round(min(max(wanted, self._least), self._most))

"""Buffers in rounds: what the ranks share of them, and the mean of what the ranks send."""

from collections.abc import Mapping

import numpy as np

from .parameters import Parameters
from .rank_mean import RankMean

_NOTHING = np.empty(0, np.float32)


class SharedBuffers:
    """What the ranks share of the model's buffers, float32[n]: the mean of the last round.

    An element that is not finite in it, such as the -inf of a mask, may be so on a rank: it costs no round, and stays each rank's
    own until it is finite on all ranks.

    Args:
        parameters: The model.
    """

    def __init__(self, parameters: Parameters):
        self._parameters = parameters
        #: float32[n], the same on all ranks once they are connected.
        self.values = parameters.read_buffers()

    def read(self, take_part: bool) -> tuple[np.ndarray, np.ndarray, bool]:
        """Copy this rank's buffers for a round.

        Args:
            take_part: Whether they are exchanged in it.

        Returns:
            The buffers and what the ranks share of them, float32[n], or nothing of either where they do not take part; and
            whether the buffers are finite where the shared ones are.
        """
        if not take_part:
            return _NOTHING, _NOTHING, True
        own = self._parameters.read_buffers()
        return own, self.values, bool((np.isfinite(own) | ~np.isfinite(self.values)).all())

    def take(self, mean: np.ndarray, keep: float) -> None:
        """Share what came of a round.

        Args:
            mean: float32[n], what `mean_of_rows` gave.
            keep: The share that a buffer keeps of itself.
        """
        known = np.isfinite(mean)
        self.values = np.where(known, mean, self.values)
        self._parameters.assign_buffers(np.where(known, mean, self._parameters.read_buffers()), keep)

    def restore(self) -> None:
        """Give this rank's buffers what the ranks share."""
        if self.values.size:
            self._parameters.assign_buffers(self.values, 0.0)


def mean_of_rows(
    rows: np.ndarray, shares: Mapping[int, float], shared: np.ndarray, of_ranks: RankMean | None
) -> np.ndarray | None:
    """Take the mean of the ranks' buffers, in the order of ranks.

    Args:
        rows: float32[ranks, n]; of ranks without a share zeros.
        shares: The share of each rank.
        shared: What the ranks share of the buffers, float32[n].
        of_ranks: A mean of what each rank sends, in the place of the weighted one.

    Returns:
        float32[n], not finite where neither `shared` nor all ranks are; None if no rank counts.
    """
    counted = [rank for rank, share in shares.items() if share]
    unknown = ~np.isfinite(shared)
    blank = unknown & ~np.isfinite(rows[counted]).all(axis=0)
    rows = np.where(blank, np.float32(0), rows)
    if of_ranks is None:
        mean = sum(share * row.astype(np.float64) for share, row in zip(shares.values(), rows, strict=True))
    else:
        mean = of_ranks.of_rows(rows, np.where(unknown, np.float32(0), shared), shares)
    return None if mean is None else np.where(blank, np.float32(np.nan), mean).astype(np.float32)

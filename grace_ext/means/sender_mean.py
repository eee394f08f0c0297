"""The mean of each element over those workers that have sent it.

FedSubAvg of Ding, Niu, Wu, Tang, Lyu and Chen, Federated submodel optimization for hot and cold data features, NeurIPS 2022, averages each
parameter over the clients whose data involve it; here, over the workers that have selected it.
"""

from collections.abc import Sequence

import numpy as np

from .base import Mean, Update


class SenderMean(Mean):
    """The weighted mean of each element over the workers that have sent it; 0 where nobody has.

    A worker that has not sent an element does not say that it should stay as it is. The weighted mean takes it so, and sparse
    updates then move the model by a part of what their senders ask for. An element counts as sent if it is not 0, or if its
    worker is known to have sent a 0; of what is sent as a whole, or under a transform, every element counts, so that this mean is the
    weighted mean there.

    Whoever is alone in sending an element decides on it: this mean bears no liars. One update is decoded at a time.
    """

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        mean, shares = np.zeros(size, np.float32), np.zeros(size, np.float32)
        for update in updates:
            _add(update, mean, shares)
        return np.divide(mean, shares, out=mean, where=shares > 0)


def _add(update: Update, mean: np.ndarray, shares: np.ndarray) -> None:
    """Add an update, and the shares of what it has."""
    vector, share = update.vector(), np.float32(update.share)
    mean += share * vector
    shares += share * ((vector != 0) | update.dense())

"""Means of what workers send, for federated servers and local steps: the weighted mean, one over those that have sent an element,
and means that bear some liars.

A server gives one as Server(mean=...), a training with local steps as LocalSteps(mean=...).
"""

from .base import Mean, Update, WeightedMean
from .clipped_mean import ClippedMean
from .median import Median
from .nearest_neighbor_mixing import NearestNeighborMixing
from .sender_mean import SenderMean
from .trimmed_mean import TrimmedMean

__all__ = ["ClippedMean", "Mean", "Median", "NearestNeighborMixing", "SenderMean", "TrimmedMean", "Update", "WeightedMean"]

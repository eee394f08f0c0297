"""Means of what workers send, for federated servers and local steps: the weighted mean, and means that bear some liars.

A server gives one as Server(mean=...), a training with local steps as LocalSteps(mean=...).
"""

from .base import Mean, Update, WeightedMean
from .clipped_mean import ClippedMean
from .median import Median
from .nearest_neighbor_mixing import NearestNeighborMixing
from .trimmed_mean import TrimmedMean

__all__ = ["ClippedMean", "Mean", "Median", "NearestNeighborMixing", "TrimmedMean", "Update", "WeightedMean"]

"""Low-rank compression, one file for each method. An allreduce sums the factors, which make no containers."""

from .powersgd import PowerSGD

__all__ = ["PowerSGD"]

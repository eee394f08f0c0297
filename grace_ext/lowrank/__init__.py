"""Low-rank compression, one file a method. Factors are linear: they are summed by allreduce and never make a container."""

from .powersgd import PowerSGD

__all__ = ["PowerSGD"]

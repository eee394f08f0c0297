"""Low-rank compression, one file a method. Factors are linear: they are summed by allreduce and never make a container."""

from .communicator import FactorAllreduce, WarmStarts
from .powersgd import PowerSGD

__all__ = ["FactorAllreduce", "PowerSGD", "WarmStarts"]

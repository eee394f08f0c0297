"""The import path that the handler of elastic Horovod had at first. It stays; importing horovod_torch is enough."""

from ._torch.elastic import CompressedOptimizer, CompressedOptimizerStateHandler, register

__all__ = ["CompressedOptimizer", "CompressedOptimizerStateHandler", "register"]

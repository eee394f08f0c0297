"""Horovod's distributed training for TensorFlow, with compressed gradients. No patch to Horovod.

    tape = DistributedGradientTape(tape)
    optimizer = DistributedOptimizer(optimizer)
"""

from ._keras import DistributedOptimizer, load_model
from ._tensorflow_tape import DistributedGradientTape, compression_stats

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "compression_stats", "load_model"]

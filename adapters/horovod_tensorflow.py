"""Horovod's distributed training for TensorFlow, with compressed gradients. No patch to Horovod.

    tape = DistributedGradientTape(tape)
"""

from ._tensorflow_tape import DistributedGradientTape, compression_stats

__all__ = ["DistributedGradientTape", "compression_stats"]

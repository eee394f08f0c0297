"""Horovod's distributed training for TensorFlow, with compressed gradients. No patch to Horovod.

    tape = DistributedGradientTape(tape)
    optimizer = DistributedOptimizer(optimizer)
"""

from ._keras import DistributedOptimizer, load_model
from ._tensorflow_tape import DistributedGradientTape, compression_stats
from .tensorflow_callbacks import (
    BroadcastGlobalVariablesCallback,
    CompressionStatsCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    broadcast_variables,
)

__all__ = [
    "BroadcastGlobalVariablesCallback", "CompressionStatsCallback", "DistributedGradientTape", "DistributedOptimizer",
    "LearningRateScheduleCallback", "LearningRateWarmupCallback", "MetricAverageCallback", "broadcast_variables",
    "compression_stats", "load_model",
]

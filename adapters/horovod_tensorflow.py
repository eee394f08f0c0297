"""Horovod's distributed training for TensorFlow, with compressed gradients. No patch to Horovod.

tape = DistributedGradientTape(tape)
optimizer = DistributedOptimizer(optimizer)
"""

from ._common.options import CompressionOptions
from ._tensorflow.callbacks import (
    BroadcastGlobalVariablesCallback,
    CompressionStateCallback,
    CompressionStatsCallback,
    MetricAverageCallback,
)
from ._tensorflow.eager import broadcast_variables
from ._tensorflow.gradient_tape import DistributedGradientTape, compression_state, compression_stats, load_compression_state
from ._tensorflow.keras_optimizer import DistributedOptimizer, load_model
from ._tensorflow.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CompressionOptions",
    "CompressionStateCallback",
    "CompressionStatsCallback",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "broadcast_variables",
    "compression_state",
    "compression_stats",
    "load_compression_state",
    "load_model",
]

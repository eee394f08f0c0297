"""Callbacks for model.fit; horovod_tensorflow has them, too."""

from ._tensorflow.callbacks import (
    BroadcastGlobalVariablesCallback,
    CompressionStateCallback,
    CompressionStatsCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    broadcast_variables,
)

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CompressionStateCallback",
    "CompressionStatsCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "broadcast_variables",
]

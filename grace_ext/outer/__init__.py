"""Outer optimizers, one file each: how the mean of the ranks' pseudo-gradients changes the values that they share.

A new one takes a file and a line here.
"""

from ..pipeline import spec
from . import adam, adamw, nesterov, sgd, yogi  # noqa: F401  (importing registers them)
from .base import OuterOptimizer

__all__ = ["OuterOptimizer", "make_outer"]


def make_outer(outer: str | OuterOptimizer) -> OuterOptimizer:
    """Make an outer optimizer from its spec.

    Args:
        outer: A spec ("nesterov:lr=0.7:momentum=0.9"), or an OuterOptimizer, which is returned as it is.

    Returns:
        The outer optimizer.

    Raises:
        ConfigError: The spec is unknown.
    """
    return outer if isinstance(outer, OuterOptimizer) else spec.parse_stage("outer", outer)  # type: ignore[return-value]

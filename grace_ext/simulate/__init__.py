"""Federated training in virtual time: links of varying bandwidth with the real compressors, memories and policies.

`python -m grace_ext simulate` is its command. It follows section 4 of Kimad (Xin et al., DistributedML 2023).
"""

from .policies import EF21, FixedDensity, GradientDescent, Kimad, KimadPlus, Optimal
from .run import Round, Setting, simulate
from .tasks import FashionMnist, Quadratic
from .theory import StepSizes, step_sizes
from .traces import Trace

__all__ = [
    "EF21",
    "FashionMnist",
    "FixedDensity",
    "GradientDescent",
    "Kimad",
    "KimadPlus",
    "Optimal",
    "Quadratic",
    "Round",
    "Setting",
    "StepSizes",
    "Trace",
    "simulate",
    "step_sizes",
]

"""Federated training in virtual time: links of varying bandwidth with the real compressors, memories and policies.

`python -m grace_ext simulate` is its command. It follows section 4 of Kimad (Xin et al., DistributedML 2023).
"""

from .policies import EF21, FixedDensity, Kimad, KimadPlus
from .run import Round, Setting, simulate
from .tasks import FashionMnist, Quadratic
from .traces import Trace

__all__ = [
    "EF21",
    "FashionMnist",
    "FixedDensity",
    "Kimad",
    "KimadPlus",
    "Quadratic",
    "Round",
    "Setting",
    "Trace",
    "simulate",
]

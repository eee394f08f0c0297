"""Training in virtual time, over links of varying bandwidth.

`python -m grace_ext simulate` trains with a federated server, with the real compressors, memories and policies; it follows section
4 of Kimad (Xin et al., DistributedML 2023). `python -m grace_ext simulate-local` times local steps and their exchanges.
"""

from .local_steps import LocalSetting, LocalTraining, Transfer, fastest, simulate_local_steps
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
    "LocalSetting",
    "LocalTraining",
    "Optimal",
    "Quadratic",
    "Round",
    "Setting",
    "StepSizes",
    "Trace",
    "Transfer",
    "fastest",
    "simulate",
    "simulate_local_steps",
    "step_sizes",
]

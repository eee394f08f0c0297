"""Rounds of local steps: workers train by themselves, and then exchange by how much their parameters have moved.

grace_ext.adapters.local_steps uses it for PyTorch. Federated training shares its weights, the outer optimizers and the means.
"""

from .auto_steps import AutoSteps
from .engine import Rounds
from .fragment import Fragment
from .parameters import ArrayParameters, Parameters
from .presets import PRESETS, Preset

__all__ = ["PRESETS", "ArrayParameters", "AutoSteps", "Fragment", "Parameters", "Preset", "Rounds"]

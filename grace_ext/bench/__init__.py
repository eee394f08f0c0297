"""Measures every part and the whole road; `python -m grace_ext bench` is its command line.

Every time is a multiple of one memcpy of the gradient. What is compared takes turns with that memcpy, so that a slower
moment of the machine hits all alike. All of it runs on one thread. A codec says by its `sweep` at which settings it wants
to be seen.
"""

from .inputs import SYNTHETIC, load
from .parts import index_bound
from .run import SPECS, Plan, measure, plan

__all__ = ["SPECS", "SYNTHETIC", "Plan", "index_bound", "load", "measure", "plan"]

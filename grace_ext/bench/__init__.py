"""Measures every stage of a compressor and whole compressors; `python -m grace_ext bench` is its command line.

Every time is a multiple of one memcpy of the gradient. What is compared runs in turns with that memcpy, so that a slower
moment of the machine affects all alike. Everything runs on one thread. A codec says by its `sweep` at which settings it is
measured.
"""

from .codecs import index_bound
from .inputs import SYNTHETIC, load
from .run import SPECS, Plan, measure, plan

__all__ = ["SPECS", "SYNTHETIC", "Plan", "index_bound", "load", "measure", "plan"]

"""Measures every stage of a compressor and whole compressors; `python -m grace_ext bench` is its command line.

Every time is a multiple of one memcpy of the gradient. Each candidate alternates with that memcpy, so that a slower moment
of the machine affects all alike. Everything runs on one thread. A codec's `sweep` attribute lists the settings to measure.
"""

from .codecs import index_bound
from .inputs import SYNTHETIC, load
from .run import SPECS, Plan, measure, plan

__all__ = ["SPECS", "SYNTHETIC", "Plan", "index_bound", "load", "measure", "plan"]

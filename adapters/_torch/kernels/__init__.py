"""Triton kernels for gradients on an accelerator: the counterparts of grace_ext/kernels, with the same bytes.

Importing this package imports Triton, so that only code that has found both does so.
"""

from ._launch import on_device as on_device
from ._launch import usable as usable

"""Gradient compression for data-parallel training. See README.md; the parts are in the modules below."""

from . import communicators, index, lowrank, memory, policy, sparsifiers, transforms, value  # noqa: F401  (registers them)
from .compressor import Compressor, compressor
from .container import parse as inspect
from .decoder import decode_add, decompress
from .errors import ConfigError, ContainerError, ExchangeError, GraceError
from .params import from_params
from .presets import PRESETS

__version__ = "0.1.0"
__all__ = [
    "Compressor", "ConfigError", "ContainerError", "ExchangeError", "GraceError", "PRESETS", "compressor", "decode_add",
    "decompress", "from_params", "inspect", "memory",
]

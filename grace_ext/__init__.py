"""Gradient compression for data-parallel training. See README.md; the parts are in the modules below."""

from . import communicators, index, memory, sparsifiers, transforms, value  # noqa: F401  (importing registers their parts)
from .compressor import Compressor, compressor, decode_add, decompress
from .container import parse as inspect
from .errors import ConfigError, ContainerError, ExchangeError, GraceError

__version__ = "0.1.0"
__all__ = [
    "Compressor", "ConfigError", "ContainerError", "ExchangeError", "GraceError", "compressor", "decode_add",
    "decompress", "inspect", "memory",
]

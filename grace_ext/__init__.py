"""Gradient compression for data-parallel training. README.md introduces it, ARCHITECTURE.md says which module does what."""

from . import communicators, index, lowrank, memory, policy, sparsifiers, transforms, value  # noqa: F401  (registers them)
from .errors import ConfigError, ContainerError, ExchangeError, GraceError
from .pipeline.compressor import Compressor
from .pipeline.compressor import make_compressor as compressor
from .pipeline.container import parse as inspect
from .pipeline.decoder import decode_add, decompress
from .pipeline.params import from_params
from .pipeline.presets import PRESETS

__version__ = "0.1.0"
__all__ = [
    "Compressor",
    "ConfigError",
    "ContainerError",
    "ExchangeError",
    "GraceError",
    "PRESETS",
    "compressor",
    "decode_add",
    "decompress",
    "from_params",
    "inspect",
    "memory",
]

"""Gradient compression for data-parallel training. README.md introduces it, ARCHITECTURE.md says which module does what."""

from typing import TYPE_CHECKING

from . import communicators, index, lowrank, outer, policy, sparsifiers, transforms, value  # noqa: F401  (registers them)
from .errors import ConfigError, ContainerError, ExchangeError, GraceError
from .pipeline.compressor import Compressor
from .pipeline.compressor import make_compressor as compressor
from .pipeline.container import parse as inspect
from .pipeline.decoder import decode_add, decompress
from .pipeline.params import from_params
from .pipeline.presets import PRESETS

if TYPE_CHECKING:  # a type checker does not know that the package `memory` can be called
    from .memory import make_memory as memory
else:
    from . import memory

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

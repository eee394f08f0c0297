"""Memories (error feedback), one file each. A new one is its file and a line here.

`grace_ext.memory("residual")` makes one from its spec, as `make_memory` does: the package can be called.
"""

import sys
import types

from ..pipeline import spec
from . import dgc, ef21, none, residual  # noqa: F401  (importing registers them)
from .base import Memory

__all__ = ["Memory", "make_memory"]


def make_memory(memory) -> Memory:
    """A Memory from its spec ("residual"), or a Memory (returned as it is)."""
    return memory if isinstance(memory, Memory) else spec.parse_stage("memory", memory)


class _Callable(types.ModuleType):
    def __call__(self, memory) -> Memory:
        return make_memory(memory)


sys.modules[__name__].__class__ = _Callable

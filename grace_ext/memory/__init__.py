"""Memories (error feedback), one file each. A new one takes a file and a line here.

`grace_ext.memory("residual")` makes a memory from its spec, as `make_memory` does: the package can be called.
"""

import sys
import types

from ..pipeline import spec
from . import adam, demo, dgc, ef21, momentum, muon, none, onebit_adam, residual, signum  # noqa: F401  (importing registers them)
from .base import Memory

__all__ = ["Memory", "make_memory"]


def make_memory(memory: str | Memory) -> Memory:
    """Make a memory from its spec.

    Args:
        memory: A spec ("residual"), or a Memory, which is returned as it is.

    Returns:
        The memory.

    Raises:
        ConfigError: The spec is unknown.
    """
    return memory if isinstance(memory, Memory) else spec.parse_stage("memory", memory)  # type: ignore[return-value]


class _Callable(types.ModuleType):
    def __call__(self, memory: str | Memory) -> Memory:
        return make_memory(memory)


sys.modules[__name__].__class__ = _Callable

"""Which memory each tensor has: one for all, or by name pattern and size."""

from ..memory import make_memory
from ..memory.base import Memory
from .patterns import Patterns

DEFAULT_MEMORY = "residual"


class Memories:
    """Memories by tensor. Tensors of equal specs share one Memory.

        {"*.embedding.weight": "none", ">1000000": "residual:decay=0.9"}

    Args:
        spec: A memory's spec ("residual"), a Memory, or a mapping from name patterns or sizes to specs, as in Rules: a
            tensor that no rule fits has DEFAULT_MEMORY.
    """

    def __init__(self, spec: str | Memory | dict = DEFAULT_MEMORY):
        self._made: dict[Memory, Memory] = {}
        mapping = spec if isinstance(spec, dict) else {"*": spec}
        self._rules = Patterns("memory", mapping, self._shared)
        self._default = self._shared(DEFAULT_MEMORY)

    def _shared(self, spec: str | Memory) -> Memory:
        made = make_memory(spec)
        return self._made.setdefault(made, made)

    def choose(self, name: str, size: int) -> Memory:
        """Choose the memory of a tensor.

        Args:
            name: Name of the tensor.
            size: Number of its elements.

        Returns:
            The memory.
        """
        found = self._rules.find(name, size)
        return self._default if found is None else found

    def all(self) -> list[Memory]:
        """List each memory that some tensor may have.

        Returns:
            The memories.
        """
        return [*self._made.values()]

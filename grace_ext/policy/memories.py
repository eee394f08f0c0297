"""Which memory a tensor's error goes to: one for all, or by name pattern and size."""

from ..memory import make_memory
from ..memory.base import Memory
from .patterns import Patterns

DEFAULT_MEMORY = "residual"


class Memories:
    """spec: a memory's spec ("residual"), a Memory, or a mapping from name patterns or sizes to specs, as in Rules: a tensor
    that no rule fits has DEFAULT_MEMORY. Tensors of equal specs share one Memory.

        {"*.embedding.weight": "none", ">1000000": "residual:decay=0.9"}
    """

    def __init__(self, spec=DEFAULT_MEMORY):
        self._made: dict[Memory, Memory] = {}
        mapping = spec if isinstance(spec, dict) else {"*": spec}
        self._rules = Patterns("memory", mapping, self._shared)
        self._default = self._shared(DEFAULT_MEMORY)

    def _shared(self, spec) -> Memory:
        made = make_memory(spec)
        return self._made.setdefault(made, made)

    def choose(self, name: str, size: int) -> Memory:
        """The memory of a tensor of that name and element count."""
        found = self._rules.find(name, size)
        return self._default if found is None else found

    def all(self) -> list[Memory]:
        """Each that some tensor may have."""
        return [*self._made.values()]

"""What a memory promises, and the fused road through it."""

import numpy as np

from ..errors import ConfigError
from ..registry import Stage, build
from .states import NumpyArrays, States


class Memory(Stage):
    """Keeps, per rank and name, what makes up for the errors of compression.

    The plain road, of memories that are error feedback, is `compensate`, compress, `update`. The fused road, for exchanges
    that can fail or turn out to be non-finite on another rank, is a transaction: `begin` hands out the residual and room
    for the next one; `correct` may change the gradient before it is encoded; `sent` and `received` see what left this rank
    and what came; `commit` puts the next states in force for all names begun since the last commit, and `rollback`
    forgets them.
    """

    kind = "memory"
    stateful = False
    #: What is kept, by field: in __init__ of those that keep something.
    states: dict[str, States] = {}
    #: The fields of which ranks together owe the sum. Of the others the mean over ranks counts.
    summed: frozenset[str] = frozenset({"residual"})
    #: Whether the momentum is its business: the optimizer must have none.
    applies_momentum = False
    #: Whether it can keep states by rows of a table.
    by_rows = False
    #: Whether `correct`, `sent` or `received` do anything. Only without can states live on an accelerator, and gradients
    #: stay where they are.
    has_hooks = False

    def check(self, compressor, communicator) -> None:
        """Raise ConfigError if this memory is of no use with that compressor or way."""
        if self.stateful and compressor.unbiased:
            raise ConfigError(
                f"{str(compressor.sparsifier)!r} is right on average by itself, and memory {self.name!r} "
                f"would correct it once more: use memory 'none', or unbiased=false"
            )

    def exact(self) -> "Memory":
        """The memory for tensors that are sent exactly."""
        return build("memory", "none")

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        """gradient: float32[d] -> float32[d], what to compress. Never the gradient's own buffer if it differs."""
        return gradient

    def update(self, name: str, compensated: np.ndarray, transmitted: np.ndarray) -> None:
        """compensated: what was compressed; transmitted: what receivers decode. Both float32[d]."""

    def begin(self, name: str, size: int, arrays=NumpyArrays):
        """(residual, room for the next one), both float32[size] of that kind of arrays, or None if none is to be added."""
        return None

    def begin_rows(self, name: str, size: int, rows: np.ndarray, width: int):
        """The same for some rows of a table of `size` elements; what a step costs depends on their number only.

        rows: int64[r], ascending, each once -> two float32[r * width], or None. `commit` changes these rows. Only where
        `by_rows` is true.
        """
        return None

    def correct(self, name: str, gradient: np.ndarray, sizes: tuple[int, ...], ranks: int) -> None:
        """Change this rank's gradient, float32[d], in place before it is encoded. sizes: of the tensors in it."""

    def sent(self, name: str, pending) -> None:
        """pending: grace_ext.communicators.base.Pending of what was encoded, still in this thread."""

    def received(self, name: str, out: np.ndarray, scale: float) -> None:
        """out: float32[d], the sum over ranks of what they sent, times scale / ranks; finite. May change it, in the same
        way on all ranks."""

    def commit(self) -> None:
        """Put the next states of all begun names in force."""
        for states in self.states.values():
            states.commit()

    def rollback(self) -> None:
        """Keep the states as they were."""
        for states in self.states.values():
            states.rollback()

    def state_dict(self) -> dict[str, dict[str, np.ndarray]]:
        """Copies of the states: name -> field -> numpy float32[size]."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for field, states in self.states.items():
            for name, array in states.copies().items():
                found.setdefault(name, {})[field] = array
        return found

    def load_state_dict(self, state: dict[str, dict[str, np.ndarray]]) -> None:
        """Replace the states. Fields that this memory does not have are left out."""
        for field, states in self.states.items():
            states.load({name: fields[field] for name, fields in state.items() if field in fields})

    def redistribute(self, states: list[dict[str, np.ndarray]], ranks: int) -> dict[str, np.ndarray]:
        """The state of each of `ranks` ranks that take over from others. states: theirs, field -> float32[d].

        Of `summed` fields the sum over ranks is what it was, of the others each gets the mean.
        """
        fields = {field: [state[field] for state in states if field in state] for field in self.states}
        return {
            field: np.sum(arrays, axis=0) / np.float32(ranks if field in self.summed else len(states))
            for field, arrays in fields.items()
            if arrays
        }

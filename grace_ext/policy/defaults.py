"""What is chosen for a user who names neither a spec nor a memory nor a schedule: it depends on the optimizer."""

import dataclasses

from .memories import DEFAULT_MEMORY
from .rules import DEFAULT_ROWS_SPEC, DEFAULT_SPEC


@dataclasses.dataclass(frozen=True)
class Default:
    """What a kind of optimizer gets.

    Attributes:
        compression: The spec of tensors that no rule fits.
        memory: The spec of the memory, or specs by name where several optimizers have one each.
        schedule: Options by step; None for none.
        small: The spec of small tensors that no rule fits.
        rows: The spec of gradients that come as rows and that no rule fits; None: see Rules.
        why: For the log: what it is chosen for.
    """

    compression: str
    memory: str | dict[str, str]
    schedule: dict[str, str] | None
    small: str
    rows: str | None
    why: str


PLAIN = Default(
    DEFAULT_SPEC, DEFAULT_MEMORY, None, "dense/raw", None, "SGD and optimizers that are not known to need another one"
)
#: docs/transformers.md has the measurements.
ADAM = Default(
    "topk:0.012/rice_adaptive/lloyd:0.05",
    "adam",
    {"density": "hyperbolic:steps=180"},
    "dense/lloyd:0.1",
    DEFAULT_ROWS_SPEC,
    "Adam and AdamW, which lose accuracy with error feedback of gradients",
)
#: The spec and the schedule are Adam's, so that the two can be in one exchange; docs/training.md has the measurements.
MUON = dataclasses.replace(
    ADAM, memory="muon", why="Muon, which loses accuracy with error feedback of gradients: ranks exchange its updates"
)


def default_for(memory: str | dict[str, str] | None) -> Default:
    """Choose a default.

    Args:
        memory: The spec of the memory that makes the optimizer's step: "adam", or "muon" with its options. Where several
            optimizers share an exchange, these by names of parameters. None where the optimizer makes its step itself.

    Returns:
        The default, with that memory.
    """
    if memory is None:
        return PLAIN
    kinds = {spec.partition(":")[0] for spec in ([memory] if isinstance(memory, str) else memory.values())}
    found = [{"adam": ADAM, "muon": MUON}[kind] for kind in sorted(kinds)]
    return dataclasses.replace(found[0], memory=memory, why="; ".join(default.why for default in found))

"""The methods that the advisor compares, and the evidence of what accuracy they keep.

Speed alone recommends nothing: a method is recommended with an optimizer only where a measurement has shown that accuracy
stays with that density, memory and optimizer.
"""

import dataclasses

from .rules import DEFAULT_SPEC

#: Kinds of optimizers. "sgd" is SGD with momentum; "adam" stands for Adam, AdamW and their kin.
OPTIMIZERS = ("sgd", "adam")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What accuracy a method was measured to have, on average over seeds, against no compression, with an optimizer.

    points: of accuracy gained; seeds: how many; what: the task; page: of docs/, with a table that has the row.
    """

    optimizer: str
    points: float
    seeds: int
    what: str
    page: str
    row: str

    @property
    def is_kept(self) -> bool:
        return self.points >= -MAX_LOSS and self.seeds >= MIN_SEEDS

    def __str__(self):
        return f"{self.points:+.2f} points with {self.optimizer} on {self.what}, {self.seeds} seed(s), docs/{self.page}"


@dataclasses.dataclass(frozen=True)
class Method:
    """spec and memory: what is sent; None: float32 by the library's own allreduce. rounds: it only rounds every element, as
    Horovod's own fp16 does, with any optimizer. evidence: of the others. note: what else belongs to it."""

    label: str
    spec: str | None
    memory: str = "none"
    rounds: bool = False
    evidence: tuple[Evidence, ...] = ()
    note: str = ""

    def keeps_accuracy(self, optimizer: str) -> bool:
        """Whether a measurement has shown it, and none the contrary."""
        found = [one for one in self.evidence if one.optimizer == optimizer]
        return self.rounds or bool(found) and all(one.is_kept for one in found)

    def kept_with(self) -> str:
        """With which optimizers accuracy was kept, for a table."""
        return ", ".join(filter(self.keeps_accuracy, OPTIMIZERS)) or "not shown"


MAX_LOSS, MIN_SEEDS = 0.5, 3  # points of accuracy on average, and over how many seeds at least
_CNN, _TEXT = "a CNN (Fashion-MNIST)", "an LSTM (text)"
#: The more exact first.
METHODS = (
    Method("none", None, rounds=True),
    Method("fp16", "dense/fp16", rounds=True),
    Method("8 bits", "dense/qsgd:8"),
    Method(
        "default",
        DEFAULT_SPEC,
        "residual",
        evidence=(
            Evidence("sgd", -0.09, 3, _CNN, "memories.md", "top-k 1 %, residual"),
            Evidence("adam", -1.65, 1, _TEXT, "benchmarks.md", "grace_ext, default (allgather)"),
        ),
    ),
    Method(
        "top 0.1 %",
        "topk:0.001/rice/qsgd:7",
        "dgc:nesterov=true",
        note="an optimizer without momentum, and schedule={'density': 'warmup:steps=N'} over the first epoch",
        evidence=(Evidence("sgd", -0.42, 3, _CNN, "memories.md", "top-k 0.1 %, dgc"),),
    ),
)

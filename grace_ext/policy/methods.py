"""The methods that the advisor compares, and the evidence of what accuracy they keep.

Speed alone recommends nothing: a method is recommended with an optimizer only where a measurement has shown that accuracy
stays with that density, memory and optimizer.
"""

import dataclasses

from .defaults import ADAM
from .rules import DEFAULT_SPEC

#: Kinds of optimizers. "sgd" is SGD with momentum; "adam" stands for Adam, AdamW and similar ones.
OPTIMIZERS = ("sgd", "adam")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The measured accuracy of a method with an optimizer, against no compression.

    Attributes:
        optimizer: One of OPTIMIZERS.
        points: Points of accuracy gained, on average over seeds.
        seeds: Number of seeds.
        what: The task.
        page: The page of docs/ that has the measurement.
        row: Label of the row in a table of that page.
    """

    optimizer: str
    points: float
    seeds: int
    what: str
    page: str
    row: str

    @property
    def is_kept(self) -> bool:
        """Whether accuracy was kept, over enough seeds."""
        return self.points >= -MAX_LOSS and self.seeds >= MIN_SEEDS

    def __str__(self) -> str:
        return f"{self.points:+.2f} points with {self.optimizer} on {self.what}, {self.seeds} seed(s), docs/{self.page}"


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of exchanging gradients.

    Attributes:
        label: What users see of it.
        spec: The spec of what is sent; None: float32 by the library's own allreduce.
        memory: The spec of the memory.
        rounds: Whether it only rounds every element, as Horovod's own fp16 does; then it keeps accuracy with any optimizer.
        evidence: Measurements of the accuracy of a method that does more.
        note: What else the method needs.
        interval: Number of steps between exchanges; above 1, an exchange hides behind nothing.
        communicators: Those that it goes with; none: all that go with the spec.
    """

    label: str
    spec: str | None
    memory: str = "none"
    rounds: bool = False
    evidence: tuple[Evidence, ...] = ()
    note: str = ""
    interval: int = 1
    communicators: tuple[str, ...] = ()

    def keeps_accuracy(self, optimizer: str) -> bool:
        """Say whether the method keeps accuracy with an optimizer.

        Args:
            optimizer: One of OPTIMIZERS.

        Returns:
            Whether a measurement has shown it, and none has shown the contrary.
        """
        found = [one for one in self.evidence if one.optimizer == optimizer]
        return self.rounds or any(one.is_kept for one in found) and all(one.points >= -MAX_LOSS for one in found)

    def kept_with(self) -> str:
        """List the optimizers with which accuracy was kept, for a table.

        Returns:
            Their names, separated by commas; "not shown" without any.
        """
        return ", ".join(filter(self.keeps_accuracy, OPTIMIZERS)) or "not shown"


MAX_LOSS, MIN_SEEDS = 0.5, 3  # points of accuracy that may be lost on average; number of seeds
_CNN, _TRANSFORMER = "a CNN (Fashion-MNIST)", "a transformer (text)"
#: In order of exactness, the most exact first.
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
            Evidence("adam", -2.99, 2, _TRANSFORMER, "transformers.md", "top-k 1 %, qsgd, residual"),
        ),
    ),
    Method(
        "PowerSGD, rank 4",
        "powersgd:4",
        "residual",
        evidence=(
            Evidence("sgd", 0.06, 3, _CNN, "memories.md", "powersgd rank 4, residual"),
            Evidence("adam", -2.48, 3, _TRANSFORMER, "transformers.md", "PowerSGD rank 4"),
        ),
    ),
    Method(
        "top 1 %, lloyd",
        "topk:0.01/auto/lloyd:0.05",
        "residual",
        evidence=(Evidence("adam", -4.42, 3, _TRANSFORMER, "transformers.md", "top-k 1 %, lloyd, residual"),),
    ),
    Method(
        "1-bit Adam",
        "dense/onebit",
        "onebit_adam:500",
        note="Adam or AdamW; the first 500 steps, as many as the memory says, are sent in float32 and not counted here",
        evidence=(
            Evidence("adam", 0.02, 3, _CNN, "memories.md", "1-bit Adam"),
            Evidence("adam", 0.55, 3, _TRANSFORMER, "transformers.md", "1-bit Adam"),
        ),
    ),
    Method(
        "Adam's default",
        ADAM.compression,
        str(ADAM.memory),
        note="Adam or AdamW; it is what they get without compression and memory",
        evidence=(Evidence("adam", 0.14, 3, _TRANSFORMER, "transformers.md", "grace_ext, default"),),
    ),
    Method(
        "top 0.1 %",
        "topk:0.001/rice/qsgd:7",
        "dgc:nesterov=true",
        note="an optimizer without momentum, and schedule={'density': 'warmup:steps=N'} over the first epoch",
        evidence=(Evidence("sgd", -0.42, 3, _CNN, "memories.md", "top-k 0.1 %, dgc"),),
    ),
    Method(
        "30 local steps",
        "topk:0.015625:per=4096/auto/lloyd:0.25",  # LocalSteps' own default, preset "sparseloco"
        "residual:decay=0.95",
        note="LocalSteps(model, optimizer, steps=30) in the place of an optimizer's wrapper",
        interval=30,
        communicators=("allgather",),  # for the preset's mean
    ),
)

"""Published methods of training with local steps, by name."""

import dataclasses

from ..errors import ConfigError
from ..means import Mean, SenderMean, WeightedMean
from ..policy.defaults import PLAIN


@dataclasses.dataclass(frozen=True)
class Preset:
    """The settings of a method. Whatever a user gives replaces its part.

    Attributes:
        compression: The spec of tensors that no rule fits.
        memory: The spec of the memory.
        outer: The spec of the outer optimizer.
        steps: Number of local steps in a round; None where the method has no usual one, so that a user has to give it.
        source: The paper, and where the settings here are not the paper's.
        small: The spec of small tensors that no rule fits (grace_ext.policy.rules), where the compression is the preset's.
        mean: What is taken of what the ranks send.
    """

    compression: str
    memory: str
    outer: str
    steps: int | None
    source: str
    small: str = PLAIN.small
    mean: Mean = WeightedMean()

    @property
    def needs_each_rank(self) -> bool:
        """Whether all ranks need what each one sends, so that "allgather" is the only communicator."""
        return not isinstance(self.mean, WeightedMean)


#: name -> settings.
PRESETS = {
    "sparseloco": Preset(
        "topk:0.015625:per=4096/auto/lloyd:0.25",
        "residual:decay=0.95",
        "sgd:1.0",
        30,
        "Sarfi, Thérien, Lidin and Belilovsky, SparseLoCo, arXiv 2508.15706: 64 of each 4,096 elements in 2 bits, decay 0.95, "
        "30 steps. The paper's formula has the mean of all workers; its first author's public code (a fork of Templar, "
        "src/tplr/compress.py) and the preset take the mean of each element over those that have sent it. Here positions and levels are "
        "entropy-coded, and small tensors are sent whole, in 2 bits: in float32 they would be half of the bytes of a model of a million "
        "parameters.",
        small="dense/lloyd:0.3",
        mean=SenderMean(),
    ),
    "diloco": Preset(
        "dense/raw",
        "none",
        "nesterov:0.7:momentum=0.9",
        500,
        "Douillard et al., DiLoCo: distributed low-communication training of language models, arXiv 2311.08105.",
    ),
    "muloco": Preset(
        "dense/qsgd:4",
        "residual:decay=0.9",
        "nesterov:0.7:momentum=0.9",
        30,
        "Thérien et al., MuLoCo: Muon is a practical inner optimizer for DiLoCo, arXiv 2505.23725: Muon for the local steps, "
        "decay 0.9, 2 to 8 bits for each element, of which 4 are taken here; the outer optimizer is DiLoCo's.",
    ),
    "fedavg": Preset(
        "dense/raw",
        "none",
        "sgd:1.0",
        None,
        "McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017. Its rounds "
        "are a number of epochs over a client's data, so that the number of steps depends on these.",
    ),
}


def preset(name: str) -> Preset:
    """Find a preset.

    Args:
        name: Its name.

    Returns:
        Its settings.

    Raises:
        ConfigError: There is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r}; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]

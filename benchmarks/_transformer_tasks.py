"""What benchmarks/transformer.py trains: models, data, optimizers and learning rates, the same for all methods."""

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from _cluster_tasks import Text, scaled
from _lib import RunFailed
from torch import nn

VOCABULARY = 2048
CONTEXT = 64  # tokens
BLOCK, EVERY = 2000, 20  # of a text, one block of this many tokens in so many is held out
PART = 64  # samples of one pass of an evaluation
PERL = "/usr/share/perl"  # of Debian's package perl-modules


@dataclasses.dataclass
class Task:
    """A model, its data and how it is trained.

    Attributes:
        label: What the page calls it.
        data: Makes the data from a folder.
        model: Makes the model.
        lr: The best learning rate of AdamW without compression.
        steps: Number of steps.
        batch: Samples of a rank in a step.
        measure: "loss" or "accuracy", of held-out data.
        weight_decay: AdamW's, for matrices.
        betas: AdamW's.
        starts_from: The task whose trained model this one starts from.
        momentum: Of SGD, which takes AdamW's place; None for AdamW.
        target: The accuracy that the page says the steps to.
        muon_lr: The best learning rate of Muon for the matrices of blocks without compression; None: AdamW has them as well.
    """

    label: str
    data: Callable
    model: Callable[[], nn.Module]
    lr: float
    steps: int
    batch: int = 4
    measure: str = "loss"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    starts_from: str | None = None
    momentum: float | None = None
    target: float | None = None
    muon_lr: float | None = None

    def optimizers(
        self, model: nn.Module, lr: float, betas: tuple[float, float], plain: bool = False
    ) -> list[torch.optim.Optimizer]:
        """Make the optimizers. Weight decay is for matrices only. plain: SGD without momentum. Muon's rate follows lr."""
        matrices = [(name, p) for name, p in model.named_parameters() if p.ndim >= 2]
        hidden = [p for name, p in matrices if self.muon_lr is not None and name.startswith("blocks.")]
        groups = [
            {"params": [p for _, p in matrices if all(p is not one for one in hidden)], "weight_decay": self.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        if plain:
            return [torch.optim.SGD(groups, lr)]
        if self.momentum is not None:
            return [torch.optim.SGD(groups, lr, self.momentum, nesterov=True)]
        adamw = torch.optim.AdamW(groups, lr, betas)
        if self.muon_lr is None:
            return [adamw]
        return [torch.optim.Muon(hidden, self.muon_lr * lr / self.lr, self.weight_decay), adamw]


def learning_rate(step: int, steps: int) -> float:
    """Compute the factor of the learning rate: a linear warm-up over a thirtieth of the steps, then a cosine down to a tenth."""
    warmup = max(1, steps // 30)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


class Tokens:
    """A text as numbers of tokens: the frequent words, and the single characters of all others.

    The vocabulary is that of the Python text, so that a model can go on from one text to the other.

    Args:
        folder: Where tokens are kept once they are made.
        text: "python" or "perl".
    """

    def __init__(self, folder: str, text: str):
        path = os.path.join(folder, f"{text}-tokens.npy")
        if not os.path.exists(path):
            os.makedirs(folder, exist_ok=True)
            np.save(f"{path}.{os.getpid()}.npy", tokens_of(text))
            os.replace(f"{path}.{os.getpid()}.npy", path)
        words = torch.from_numpy(np.load(path).astype(np.int64))
        blocks = words[: len(words) // BLOCK * BLOCK].view(-1, BLOCK)
        held_out = torch.arange(len(blocks)) % EVERY == EVERY // 2
        self._train, self._test = blocks[~held_out].flatten(), blocks[held_out].flatten()

    def batch(self, generator: torch.Generator, size: int) -> torch.Tensor:
        starts = torch.randint(len(self._train) - CONTEXT - 1, (size, 1), generator=generator)
        return self._train[starts + torch.arange(CONTEXT + 1)]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, float, int]:
        """Return the sum of losses and of right guesses in this rank's share of the held-out text, and the number of tokens."""
        rows = self._test[: len(self._test) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)[rank::ranks]
        losses, right = 0.0, 0
        for part in rows.split(PART):
            scores, words = model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()
            losses += F.cross_entropy(scores, words, reduction="sum").item()
            right += int((scores.argmax(1) == words).sum())
        return losses, right, rows[:, 1:].numel()


def tokens_of(text: str) -> np.ndarray:
    """Return the tokens of a text, int32."""
    words = split(python_text())
    characters = sorted(set("".join(words)))
    frequent = [word for word, _ in Counter(words).most_common(2 * VOCABULARY) if len(word) > 1]
    number_of = {word: i for i, word in enumerate([*characters, *frequent][:VOCABULARY])}
    if text == "perl":
        words = split(perl_text())
    unknown = number_of["?"]
    pieces = ([number_of[word]] if word in number_of else [number_of.get(c, unknown) for c in word] for word in words)
    return np.fromiter((number for piece in pieces for number in piece), np.int32)


def split(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+|[^\sA-Za-z]", text)


def python_text() -> str:
    """Return Python's language reference and the docstrings of its standard library."""
    from pytorch_text import documents

    return "\n".join(documents())


def perl_text() -> str:
    """Return the documentation of Perl's modules."""
    text = "\n".join(_pod_paragraphs())
    if not text:
        raise RunFailed(f"there is no documentation of Perl in {PERL}: install Debian's package perl-modules")
    return text


def _pod_paragraphs() -> Iterator[str]:
    for folder, subfolders, files in os.walk(PERL):
        subfolders.sort()
        for name in sorted(files):
            if name.endswith((".pod", ".pm")):
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                    for block in re.findall(r"^=(?:pod|head\d|over|item).*?^=cut", file.read(), re.M | re.S):
                        yield from (line for line in block.split("\n") if not line.startswith(("=", " ", "\t")))


class Images:
    """Fashion-MNIST."""

    def __init__(self, folder: str):
        from fashion_mnist import read_idx

        self._train, self._test = (
            (
                read_idx(folder, f"{part}-images-idx3-ubyte").unsqueeze(1),
                read_idx(folder, f"{part}-labels-idx1-ubyte").long(),
            )
            for part in ("train", "t10k")
        )

    def batch(self, generator: torch.Generator, size: int) -> tuple:
        images, labels = self._train
        chosen = torch.randint(len(images), (size,), generator=generator)
        return scaled(images[chosen]), labels[chosen]

    def loss(self, model: nn.Module, batch: tuple) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, float, int]:
        images, labels = (tensor[rank::ranks] for tensor in self._test)
        scores = torch.cat([model(scaled(part)) for part in images.split(250)])
        right = int((scores.argmax(1) == labels).sum())
        return F.cross_entropy(scores, labels, reduction="sum").item(), right, len(labels)


class Words:
    """The LSTM text of benchmarks/cluster.py."""

    def __init__(self, folder: str):
        from _cluster_tasks import write_words

        write_words(folder)
        self._text = Text(steps=0)
        self._text.load(folder)

    def batch(self, generator: torch.Generator, size: int) -> torch.Tensor:
        return self._text.batch(generator)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, float, int]:
        right, count = self._text.right(model, rank, ranks)
        return float("nan"), right, count


class Block(nn.Module):
    """A transformer block with its norms first."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, tied: bool = False):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        initialize(self, layers)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Take int64[batch, length]; return the scores of each next token, float32[batch, length, VOCABULARY]."""
        return self.head(self.norm(self.blocks(self.words(words) + self.places.weight[: words.shape[1]])))


class VisionTransformer(nn.Module):
    """A classifier of images in patches of 4 x 4."""

    def __init__(self, width: int = 96, layers: int = 4, heads: int = 4):
        super().__init__()
        self.patches, self.places = nn.Linear(16, width), nn.Embedding(49, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        initialize(self, layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Take float32[batch, 1, 28, 28]; return the scores of the classes, float32[batch, 10]."""
        x = self.patches(F.unfold(images, 4, stride=4).transpose(1, 2)) + self.places.weight
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


def initialize(model: nn.Module, layers: int) -> None:
    """Initialize as GPT-2: normal weights, those of each residual branch's last layer smaller."""
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            last = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if last else 1))
        elif name.endswith("bias"):
            nn.init.zeros_(p)


def _lstm() -> nn.Module:
    from _cluster_tasks import LanguageModel

    return LanguageModel()


def _cnn() -> nn.Module:
    from fashion_mnist import small

    return small()


#: The task of the accuracy map.
MAP = "fashion"
TASKS = {
    "gpt": Task("Transformer, 1.3 M parameters", lambda f: Tokens(f, "python"), Transformer, lr=2e-3, steps=3000),
    "gpt-muon": Task(
        "Transformer, 1.3 M parameters, under Muon and AdamW",
        lambda f: Tokens(f, "python"),
        Transformer,
        lr=2e-3,
        steps=3000,
        muon_lr=0.02,
    ),
    "gpt-tied": Task(
        "Transformer, tied embedding, 1.1 M parameters",
        lambda f: Tokens(f, "python"),
        lambda: Transformer(tied=True),
        lr=2e-3,
        steps=3000,
    ),
    "vit": Task(
        "Vision transformer, 0.45 M parameters", Images, VisionTransformer, lr=1e-3, steps=3000, batch=16, measure="accuracy"
    ),
    "fine-tuning": Task(
        "Fine-tuning on a second text", lambda f: Tokens(f, "perl"), Transformer, lr=5e-4, steps=1500, starts_from="gpt"
    ),
    "lstm": Task("LSTM, 7.3 M parameters", Words, _lstm, lr=3e-3, steps=400, batch=16, measure="accuracy", weight_decay=0.0),
    "gpt-10m": Task(
        "Transformer, 11 M parameters",
        lambda f: Tokens(f, "python"),
        lambda: Transformer(width=384, layers=5, heads=6),
        lr=1e-3,
        steps=3000,
    ),
    MAP: Task(
        "The accuracy map: CNN, 1.2 M parameters, SGD",
        Images,
        _cnn,
        lr=0.05,
        steps=1500,
        batch=16,
        measure="accuracy",
        weight_decay=5e-4,
        momentum=0.9,
        target=0.9,
    ),
}

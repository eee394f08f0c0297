"""What benchmarks/cluster.py trains: models, data and optimizers, the same in all configurations."""

import os

import _lib  # noqa: F401  (the examples can be imported after it)
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BATCH = 16  # per rank
PART = 500  # samples of one pass of an evaluation
WORDS, WIDTH, STATE, LENGTH = 50_000, 128, 128, 20
FREQUENT = 1000  # words of the head of the adaptive softmax
HELD_OUT = 40_000  # words


class Images:
    """Fashion-MNIST. `model()` returns an nn.Module that maps images to scores."""

    lr = 0.05

    def __init__(self, model, steps: int):
        self._model, self.steps = model, steps

    def build(self) -> nn.Module:
        return self._model()

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, self.lr, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)

    def load(self, folder: str) -> None:
        from fashion_mnist import read_idx

        self._train, self._test = (
            (
                read_idx(folder, f"{part}-images-idx3-ubyte").unsqueeze(1),
                read_idx(folder, f"{part}-labels-idx1-ubyte").long(),
            )
            for part in ("train", "t10k")
        )

    def batch(self, generator) -> tuple:
        images, labels = self._train
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        return scaled(images[chosen]), labels[chosen]

    def loss(self, model, batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.inference_mode()
    def right(self, model, rank: int, ranks: int) -> tuple[int, int]:
        """Return how many of this rank's share of the test set are classified correctly, and how many there are."""
        images, labels = (tensor[rank::ranks] for tensor in self._test)
        scores = torch.cat([model(scaled(part)) for part in images.split(PART)])
        return int((scores.argmax(1) == labels).sum()), len(labels)


def scaled(images: torch.Tensor) -> torch.Tensor:
    """Convert uint8 to float32 with mean 0 and variance 1 over the training set."""
    return (images.float() / 255 - 0.286) / 0.353


class Text:
    """The English of Python itself, as in examples/pytorch_text.py: predict the next word.

    Accuracy is how often the likeliest of the FREQUENT words is the right one.
    """

    lr = 0.003

    def __init__(self, steps: int):
        self.steps = steps

    def build(self) -> nn.Module:
        return LanguageModel()

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, self.lr, fused=True)

    def load(self, folder: str) -> None:
        words = torch.from_numpy(np.load(os.path.join(folder, "words.npy")))
        self._train, self._test = words[:-HELD_OUT], words[-HELD_OUT:]

    def batch(self, generator) -> torch.Tensor:
        starts = torch.randint(len(self._train) - LENGTH, (BATCH, 1), generator=generator)
        return self._train[starts + torch.arange(LENGTH + 1)]

    def loss(self, model, batch) -> torch.Tensor:
        return model(batch)

    @torch.inference_mode()
    def right(self, model, rank: int, ranks: int) -> tuple[int, int]:
        windows = self._test[: HELD_OUT // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)[rank::ranks]
        right = sum(int((model.predict(part) == part[:, 1:].flatten()).sum()) for part in windows.split(PART))
        return right, windows[:, 1:].numel()


class LanguageModel(nn.Module):
    """7.3 million parameters, most of them in the embedding.

    With adaptive softmax (Grave et al., Efficient softmax approximation for GPUs, ICML 2017), 50,000 words need little
    computation.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, STATE, batch_first=True)
        self.output = nn.AdaptiveLogSoftmaxWithLoss(STATE, WORDS, cutoffs=[FREQUENT, 10_000], div_value=4.0)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, words):
        """Take int64[batch, length + 1]; return the loss of predicting each next word."""
        # A batch without rare words would leave their parameters without a gradient, which DDP does not take.
        nothing = 0.0 * sum(p.sum() for p in self.output.tail.parameters())
        return self.output(self._states(words), words[:, 1:].flatten()).loss + nothing

    def predict(self, words):
        """Take int64[batch, length + 1]; return the likeliest next words, int64[batch * length]."""
        return self.output.head(self._states(words))[:, :FREQUENT].argmax(1)

    def _states(self, words):
        states, _ = self.lstm(self.embedding(words[:, :-1]))
        return states.flatten(0, 1)


def mlp() -> nn.Module:
    """Make a network of 5.8 million parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def cnn() -> nn.Module:
    """Make a network of 6.5 million parameters, most of them in the first fully connected layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 64, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )


TASKS = {"mlp": Images(mlp, steps=500), "cnn": Images(cnn, steps=400), "text": Text(steps=400)}


def write_words(folder: str) -> None:
    """Write the text as numbers of words, the most frequent word first, for `Text.load`."""
    path = os.path.join(folder, "words.npy")
    if os.path.exists(path):
        return
    from pytorch_text import read_words

    rows = read_words().numpy()
    frequent = np.argsort(-np.bincount(rows, minlength=WORDS), kind="stable")
    number_of = np.empty(WORDS, np.int64)
    number_of[frequent] = np.arange(WORDS)
    os.makedirs(folder, exist_ok=True)
    np.save(path + ".new.npy", number_of[rows])
    os.replace(path + ".new.npy", path)

"""What servers and clients of fedavg_fashion_mnist.py do: the split of the data, and local training."""

import numpy as np
import torch
import torch.nn.functional as F
from fashion_mnist import small
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from grace_ext import ConfigError

_TRIES = 1000


def mlp():
    """Make a network of 0.54 million parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


MODELS = {"mlp": mlp, "small": small}


def lda_split(labels: np.ndarray, clients: int, alpha: float, seed: int, least: int = 10) -> list[np.ndarray]:
    """Choose the samples of each client, int64[n] each, ascending. labels: int[N].

    Each class is divided by shares from a Dirichlet distribution with parameter alpha: the smaller it is, the more the
    clients differ. The split is drawn again until each client has `least` samples.

    Hsu, Qi and Brown, Measuring the effects of non-identical data distribution for federated visual classification, 2019;
    class by class as FedML does (He et al., 2020), where it is called Latent Dirichlet Allocation.
    """
    if not alpha > 0:
        raise ConfigError(f"alpha={alpha}; allowed: above 0")
    random = np.random.default_rng(seed)
    for _ in range(_TRIES):
        parts = [[] for _ in range(clients)]
        for label in np.unique(labels):
            chosen = random.permutation(np.flatnonzero(labels == label))
            ends = np.cumsum(random.dirichlet(np.full(clients, alpha)))[:-1] * chosen.size
            for part, piece in zip(parts, np.split(chosen, ends.astype(np.int64)), strict=True):
                part.append(piece)
        split = [np.sort(np.concatenate(part)) for part in parts]
        if min(part.size for part in split) >= least:
            return split
    raise ConfigError(
        f"{len(labels)} samples could not be split with alpha={alpha} so that each of {clients} clients has "
        f"{least}; take a larger alpha or fewer clients"
    )


def vector_of(net: nn.Module) -> np.ndarray:
    """Copy the parameters of a network as float32[d]."""
    return parameters_to_vector(net.parameters()).detach().numpy().copy()


def set_vector(net: nn.Module, vector: np.ndarray) -> None:
    """Copy a vector, float32[d], to the parameters of a network."""
    vector_to_parameters(torch.tensor(vector), net.parameters())


@torch.inference_mode()
def evaluate(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Compute the accuracy, 0 to 1."""
    scores = torch.cat([net(part) for part in images.split(500)])
    return float((scores.argmax(1) == labels).double().mean())


class LocalTraining:
    """A client's samples, and its work in a round.

    The batches depend on the seed, the client and the round only, so that a resumed job draws the same ones.
    """

    def __init__(self, net: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, batch: int, number: int, seed: int):
        self.net, self._images, self._labels = net, images, labels
        self._batch, self._number, self._seed = batch, number, seed

    def _order(self, round_: int, epoch: int) -> torch.Tensor:
        """Draw the order of the samples, int64[n]."""
        random = np.random.default_rng((self._seed, self._number, round_, epoch))
        return torch.from_numpy(random.permutation(len(self._labels)))

    def _loss(self, chosen: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(self._images[chosen]), self._labels[chosen])


class Epochs(LocalTraining):
    """FedAvg: some epochs of Adam, which begins anew in each round, over all samples."""

    def __init__(self, *args, epochs: int, lr: float, **options):
        super().__init__(*args, **options)
        self._epochs, self._lr = epochs, lr

    def __call__(self, model: np.ndarray, round_: int) -> tuple[np.ndarray, int]:
        """Train the model, float32[d]; return the trained model, float32[d], and the number of samples."""
        set_vector(self.net, model)
        optimizer = torch.optim.Adam(self.net.parameters(), self._lr, fused=True)
        for epoch in range(self._epochs):
            for chosen in self._order(round_, epoch).split(self._batch):
                optimizer.zero_grad()
                self._loss(chosen).backward()
                optimizer.step()
        return vector_of(self.net), len(self._labels)


class Gradient(LocalTraining):
    """Panthalia: the gradient of some batches.

    The model that is returned is the one received minus the gradient, so that the client's update is the gradient.
    """

    def __init__(self, *args, batches: int, **options):
        super().__init__(*args, **options)
        self._batches = batches

    def __call__(self, model: np.ndarray, round_: int) -> tuple[np.ndarray, int]:
        """Take a model, float32[d]; return it minus the gradient, float32[d], and the number of samples."""
        set_vector(self.net, model)
        self.net.zero_grad()
        chosen = self._order(round_, 0)[: self._batches * self._batch]
        self._loss(chosen).backward()
        gradient = parameters_to_vector(parameter.grad for parameter in self.net.parameters())
        return model - gradient.numpy(), len(self._labels)

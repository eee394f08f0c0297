"""What a simulation trains: the quadratic of equation (10) of Kimad, and a network on Fashion-MNIST."""

import contextlib
import gzip
import os

import numpy as np

from ..errors import ConfigError


class Quadratic:
    """f(x) = sum(a * x**2) / 2, with a from 1 down to 1/100 in equal ratios: section 4.1 of Kimad.

    Args:
        dimension: Number of elements of x.
        layers: Number of layers, which are equal parts of x.

    Raises:
        ConfigError: There are fewer elements than layers, or no layer.
    """

    def __init__(self, dimension: int = 3000, layers: int = 3):
        if not 1 <= layers <= dimension:
            raise ConfigError(f"{layers} layers of {dimension} elements; allowed: 1 to as many as elements")
        self._a = np.geomspace(1, 0.01, dimension)
        self.start = np.ones(dimension, np.float32)
        #: Number of elements of each layer.
        self.layers = [part.size for part in np.array_split(self.start, layers)]
        #: L_i of each layer and L of all, for grace_ext.simulate.theory.
        self.layer_smoothness = [float(part.max()) for part in np.array_split(self._a, layers)]
        self.smoothness = float(self._a.max())

    def gradient(self, model: np.ndarray, worker: int, step: int) -> tuple[np.ndarray, float]:
        """Compute the gradient, which is the same for all workers.

        Args:
            model: float32[d].
            worker: Number of the worker.
            step: Number of the step.

        Returns:
            The gradient, float32[d], and the loss.
        """
        return (self._a * model).astype(np.float32), self._loss(model)

    def _loss(self, model: np.ndarray) -> float:
        return float(np.sum(self._a * np.square(model, dtype=np.float64)) / 2)

    def accuracy(self, model: np.ndarray) -> float | None:
        """Return None, because a quadratic has no accuracy.

        Args:
            model: float32[d].

        Returns:
            None.
        """
        return None


class FashionMnist:
    """A network of two convolutions and two fully connected layers, 409,146 parameters, on Fashion-MNIST.

    It needs torch. It is deterministic: it runs on one thread, and a worker's images depend only on the seed, the worker and
    the step.

    Args:
        folder: The folder with the data set's four files.
        batch: Number of images per worker and step, at least 1.
        seed: Seed of the weights and of the choice of images.

    Raises:
        ConfigError: torch or a file is missing, or the batch is below 1.
    """

    def __init__(self, folder: str, batch: int = 32, seed: int = 0):
        try:
            import torch
        except ImportError as error:
            raise ConfigError("this task needs PyTorch: pip install 'grace_ext[torch]'") from error
        if batch < 1:
            raise ConfigError(f"batch={batch}; allowed: from 1 on")
        self._torch, self._batch, self._seed = torch, batch, seed
        self._train, self._test = (tuple(map(torch.from_numpy, _load(folder, part))) for part in ("train", "t10k"))
        nn = torch.nn
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self._net = nn.Sequential(
                nn.Conv2d(1, 16, 4, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.MaxPool2d(2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(32 * 7 * 7, 256),
                nn.ReLU(),
                nn.Linear(256, 10),
            )
        self._parameters = list(self._net.parameters())
        self.start = self._flat(self._parameters)
        sizes = [one.numel() for one in self._parameters]
        self._ends = np.cumsum(sizes)[:-1]
        #: Number of elements of each layer, which is a weight and its bias.
        self.layers = [weight + bias for weight, bias in zip(sizes[::2], sizes[1::2], strict=True)]

    def gradient(self, model: np.ndarray, worker: int, step: int) -> tuple[np.ndarray, float]:
        """Compute the gradient of a worker's images.

        Args:
            model: float32[d].
            worker: Number of the worker.
            step: Number of the step.

        Returns:
            The gradient, float32[d], and the loss.
        """
        self._put(model)
        images, labels = self._train
        chosen = np.random.default_rng((self._seed, worker, step)).integers(len(images), size=self._batch)
        with self._one_thread():
            self._net.zero_grad()
            loss = self._torch.nn.functional.cross_entropy(self._net(images[chosen]), labels[chosen])
            loss.backward()
        return self._flat([one.grad for one in self._parameters]), loss.item()

    def accuracy(self, model: np.ndarray) -> float:
        """Compute the accuracy on the test images.

        Args:
            model: float32[d].

        Returns:
            The accuracy, 0 to 1.
        """
        self._put(model)
        images, labels = self._test
        with self._one_thread(), self._torch.inference_mode():
            right = sum(
                int((self._net(some).argmax(1) == true).sum())
                for some, true in zip(images.split(1000), labels.split(1000), strict=True)
            )
        return right / len(labels)

    @contextlib.contextmanager
    def _one_thread(self):
        """Compute on one thread, so that sums have the same order on every machine."""
        threads = self._torch.get_num_threads()
        self._torch.set_num_threads(1)
        try:
            yield
        finally:
            self._torch.set_num_threads(threads)

    def _put(self, model: np.ndarray) -> None:
        with self._torch.no_grad():
            for parameter, values in zip(self._parameters, np.split(model, self._ends), strict=True):
                parameter.copy_(self._torch.from_numpy(values).view_as(parameter))

    def _flat(self, tensors) -> np.ndarray:
        return self._torch.cat([one.detach().flatten() for one in tensors]).numpy().copy()


def _load(folder: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Load images, float32[n, 1, 28, 28] with mean 0 and variance 1, and labels, int64[n]."""
    images, labels = (_read(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return ((images.astype(np.float32) / 255 - 0.286) / 0.353)[:, None], labels.astype(np.int64)


def _read(folder: str, name: str) -> np.ndarray:
    path = os.path.join(folder, name)
    opener, path = (open, path) if os.path.exists(path) else (gzip.open, path + ".gz")
    if not os.path.exists(path):
        raise ConfigError(f"there is no {path}; python mpirun/fetch_fashion_mnist.py in the repository fetches the data set")
    with opener(path, "rb") as file:
        content = file.read()
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, "u1", offset=4 + 4 * len(shape)).reshape(shape)

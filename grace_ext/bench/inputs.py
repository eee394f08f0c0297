"""The gradients that are measured on: synthetic ones, and files of captured ones."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from ..kernels import NON_FINITE, max_magnitude
from ..pipeline import container
from ..pipeline.compressor import as_dense


def _heavy(rng, d):
    return rng.standard_normal(d, np.float32) * np.exp(rng.standard_normal(d, np.float32))


def _clustered(rng, d):
    scales = np.exp(2 * rng.standard_normal(-(-d // 256), np.float32))
    return rng.standard_normal(d, np.float32) * np.repeat(scales, 256)[:d]


def _uniform_positions(rng, d, density):
    gradient = np.zeros(d, np.float32)
    positions = rng.choice(d, max(1, round(density * d)), replace=False, shuffle=False)
    gradient[positions] = rng.standard_normal(positions.size, np.float32)
    return gradient


#: Synthetic gradients: name -> function of (rng, d, largest density) that returns float32[d].
SYNTHETIC: dict[str, Callable] = {
    "heavy": lambda rng, d, density: _heavy(rng, d),
    "gauss": lambda rng, d, density: rng.standard_normal(d, np.float32),
    "clustered": lambda rng, d, density: _clustered(rng, d),
    "uniform-positions": _uniform_positions,
}


def gradients(inputs: list[str], sizes: list[int], density: float, seed: int) -> dict[str, Callable[[], np.ndarray]]:
    """Make the gradients that are asked for.

    Args:
        inputs: Names in SYNTHETIC, and files.
        sizes: Numbers of elements, for each synthetic gradient.
        density: The largest density that will be measured.
        seed: Seed of the synthetic gradients.

    Returns:
        Label -> function that returns the gradient, float32[d].

    Raises:
        ConfigError: A size is too large, or a file holds no gradient.
    """
    for size in sizes:
        container.check_elements(size)

    def synthetic(name, d):
        return lambda: SYNTHETIC[name](np.random.default_rng(seed), d, density)

    found = {}
    for name in inputs:
        if name in SYNTHETIC:
            found.update({f"{name}, {d:,} elements": synthetic(name, d) for d in sizes})
            continue
        saved = load(name)
        label = f"{Path(name).name}, {saved.size:,} elements"
        found[f"{name}, {saved.size:,} elements" if label in found else label] = lambda saved=saved: saved
    return found


def load(path: str) -> np.ndarray:
    """Load the arrays of a .npy or .npz file as one gradient, in their order.

    Args:
        path: The file.

    Returns:
        float32[d].

    Raises:
        ConfigError: There is no such file, it holds no arrays of numbers, or the gradient is empty, all zeros or not finite.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = [loaded] if isinstance(loaded, np.ndarray) else [loaded[name] for name in loaded.files]
    except FileNotFoundError:
        known = ", ".join(SYNTHETIC)
        raise ConfigError(f"{path}: there is no such file, and it is not one of {known}") from None
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not a .npy or .npz file of numbers: {error}") from None
    gradient = np.concatenate([np.empty(0, np.float32), *(as_dense(array)[0] for array in arrays)])
    largest = max_magnitude(gradient)
    if not 0 < largest < NON_FINITE:
        raise ConfigError(f"{path}: the gradient is {'not finite' if largest else 'empty or all zeros'}")
    return gradient

"""What crosses between an accelerator and the host: named sections in one buffer, copied at once."""

from collections.abc import Mapping

import numpy as np
import torch


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """Copy a tensor to the host, through pinned memory, and wait for it. It is the only way that tensors come there."""
    if tensor.device.type != "cuda":
        return tensor.cpu().numpy()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned.numpy()


def to_device(array: np.ndarray, device: str | torch.device) -> torch.Tensor:
    """Copy an array, which may change once this has returned, to a device, without waiting for it."""
    if torch.device(device).type != "cuda":
        return torch.from_numpy(array.copy()).to(device)
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


class _Layout:
    """Places of sections in int32 words; each begins at a word, and a word of zeros follows."""

    def __init__(self, sizes: Mapping[str, int]):
        self.places, self.words = {}, 0
        for name, size in sizes.items():
            self.places[name] = self.words, size
            self.words += -(-size // 4) + 1


class Outbox:
    """A buffer of zeros on a device, with sections of so many bytes, that kernels write to; `fetch` brings all of it."""

    def __init__(self, sizes: Mapping[str, int], device):
        self._layout = _Layout(sizes)
        self._buffer = torch.zeros(self._layout.words, dtype=torch.int32, device=device)

    def words(self, name: str) -> torch.Tensor:
        """A section and the word behind it, int32[m]."""
        start, size = self._layout.places[name]
        return self._buffer[start : start - (-size // 4) + 1]

    def view(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A section, dtype[m]."""
        size = self._layout.places[name][1]
        return self.words(name).view(dtype)[: size // dtype.itemsize]

    def fetch(self) -> dict[str, np.ndarray]:
        """All sections on the host, uint8[m] each. It waits for the kernels."""
        data = to_host(self._buffer).view(np.uint8)
        return {name: data[4 * start : 4 * start + size] for name, (start, size) in self._layout.places.items()}


class Inbox:
    """Sections uint8[m] of the host, on a device."""

    def __init__(self, sections: Mapping[str, np.ndarray], device):
        self._layout = _Layout({name: section.size for name, section in sections.items()})
        data = np.zeros(4 * self._layout.words, np.uint8)
        for name, section in sections.items():
            start = 4 * self._layout.places[name][0]
            data[start : start + section.size] = section
        self._buffer = to_device(data.view(np.int32), device)

    def words(self, name: str) -> torch.Tensor:
        """A section, filled up with zeros to a word, and one more word of zeros, int32[m]."""
        start, size = self._layout.places[name]
        return self._buffer[start : start - (-size // 4) + 1]

    def view(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A section, dtype[m]."""
        return self.words(name).view(dtype)[: self._layout.places[name][1] // dtype.itemsize]

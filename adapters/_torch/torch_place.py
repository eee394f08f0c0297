"""The place of tensors on a device, by torch operations alone: where there are no kernels for it."""

from typing import Any

import numpy as np
import torch

from grace_ext._util.rng import Stream
from grace_ext.communicators.places import Place
from grace_ext.communicators.reducible import fp16_limit
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.container import Container
from grace_ext.pipeline.decoder import unpack
from grace_ext.pipeline.square_sums import SquareSums
from grace_ext.transport.base import Transport

from .mailbox import to_device, to_host

MAGNITUDE = 0x7FFFFFFF


class TorchPlace(Place):
    """Tensors of a device. It encodes the top-k of whole buckets alone; indices and values cross to the host, where the codecs run."""

    def __init__(self, device: str):
        self._device = device

    def empty(self, what: str, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._device)

    def zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self._device)

    @staticmethod
    def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.add(a, b, out=out)

    def encode(
        self,
        compressor: Compressor,
        gradient: torch.Tensor,
        stream: Stream,
        *,
        state: tuple | None,
        sizes: tuple[int, ...] | None,
    ) -> Any:
        if state is not None:
            gradient += state[0]
        sparsifier: Any = compressor.sparsifier
        indices = select_topk(gradient, sparsifier.count(len(gradient)))
        encoded: Any = compressor.pack(
            len(gradient),
            to_host(indices.to(torch.int32)).view(np.uint32),
            to_host(gradient[indices]).copy(),
            lambda support: to_host(gradient[self._positions(support)]).copy(),
            stream,
        )
        if state is not None and not encoded.non_finite:
            gradient[self._positions(encoded.support)] = to_device(encoded.values - encoded.decoded, self._device)
        return encoded

    def decode_sum(self, containers: list[Container], out: torch.Tensor, weight: float, squares: SquareSums | None) -> None:
        non_finite = any(one.non_finite for one in containers)
        out.fill_(torch.nan if non_finite else 0)
        for one in containers if not non_finite else ():
            support, values = np.empty(one.k, np.uint32), np.empty(one.k, np.float32)
            unpack(one, support, values)
            # Positions are unique, so the sum is exact.
            out.index_add_(0, self._positions(support), to_device(values, self._device) * weight)

    def to_reducible(
        self, gradient: torch.Tensor, state: tuple | None, dtype: str, transport: Transport
    ) -> np.ndarray | torch.Tensor:
        if state is not None:
            gradient += state[0]
        if dtype == "float32":
            sent = gradient if state is None else gradient.clone()
        else:
            limit = float(fp16_limit(transport.size))
            halves = gradient.clamp(-limit, limit).half()
            sent = torch.where(torch.isfinite(gradient).all(), halves, torch.nan)
        if state is not None:
            gradient -= sent.float()
        return _message(sent, transport)

    def write_sum(self, summed: np.ndarray | torch.Tensor, out: torch.Tensor, weight: float) -> bool:
        torch.mul(self._received(summed).float(), weight, out=out)
        return bool(to_host(torch.isfinite(out).all()))

    @staticmethod
    def to_bytes(gradient: torch.Tensor, transport: Transport) -> np.ndarray | torch.Tensor:
        return _message(gradient.view(torch.uint8), transport)

    def add_received(self, received: np.ndarray | torch.Tensor, accumulator: torch.Tensor) -> None:
        if len(received):  # else torch knows no stride to view it by
            for row in self._received(received).view(torch.float32).view(-1, len(accumulator)):
                accumulator += row

    @staticmethod
    def votes_of(gradient: torch.Tensor) -> torch.Tensor:
        votes = torch.where(gradient < 0, -1.0, 1.0).float()  # whatever the user's default dtype is
        return torch.where(torch.isfinite(gradient), votes, torch.nan)

    def _received(self, message: np.ndarray | torch.Tensor) -> torch.Tensor:
        return message if isinstance(message, torch.Tensor) else to_device(message, self._device)

    def _positions(self, support: np.ndarray) -> torch.Tensor:
        return to_device(support.view(np.int32), self._device).long()


def _message(tensor: torch.Tensor, transport: Transport) -> np.ndarray | torch.Tensor:
    """What the transport's collectives take of a tensor, which may be overwritten."""
    return to_host(tensor).copy() if transport.message_device is None else tensor


def select_topk(dense: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest magnitudes of float32[d], ascending; ties by lowest index, never an exact zero."""
    magnitude = dense.view(torch.int32) & MAGNITUDE
    bound = torch.topk(magnitude, k, sorted=False).values.min().clamp(min=1)
    above = torch.nonzero(magnitude > bound).flatten()
    ties = torch.nonzero(magnitude == bound).flatten()[: k - above.numel()]
    return torch.cat([above, ties]).sort().values

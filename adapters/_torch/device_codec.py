"""What encodes a value codec's values on an accelerator: the interface of device_values.py and device_tables.py."""

import dataclasses
from typing import Any

import numpy as np
import torch

from .kernels import packed
from .mailbox import Inbox, Outbox


@dataclasses.dataclass(frozen=True)
class Source:
    """What is encoded.

    values: float32[n]; residual: float32[n], which is added to it, or None. positions: int32[n], where the values are in the
    gradient; None for everywhere. remainder: float32[d] for what the codes do not carry, or the bits of bfloat16[d], int16, or None.
    """

    values: torch.Tensor
    residual: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    remainder: torch.Tensor | None = None

    def arrays(self, unused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The four, for a kernel; `unused` where there is none."""
        given = (self.values, self.residual, self.positions, self.remainder)
        return tuple(unused if one is None else one for one in given)

    def without_residual(self) -> "Source":
        """The same, once the residual has been added to the values."""
        return dataclasses.replace(self, residual=None)

    def keep(self, left: torch.Tensor) -> None:
        """Write what the codes do not carry of the values, float32[n], to the remainder, if there is one."""
        if self.remainder is None:
            return
        if self.positions is None:
            self.remainder.copy_(left)
        else:
            packed.put(left, self.positions, self.remainder)

    def flags(self) -> dict[str, bool]:
        """Which of them there are, as kernels' constants."""
        return {"FUSED": self.residual is not None, "KEEP": self.remainder is not None, "SPARSE": self.positions is not None}


class DeviceCodec:
    """What a value codec has kernels for. A subclass names the codec's class.

    fits(codec): whether a codec with these options is one of them. sizes(n): bytes of the sections that `encode` writes to the
    outbox for n values, and `section` makes the container's section of; before `prepare`, the most that they can be.
    unpack(section, n): parts of a received section for the inbox, checked, and options for `decode`; None if kernels can't decode
    it, and where the host is to say what is wrong.
    """

    def __init__(self, codec: Any):
        self._codec = codec

    @staticmethod
    def fits(codec: Any) -> bool:
        return True

    def sizes(self, n: int) -> dict[str, int]:
        raise NotImplementedError

    def prepare(self, source: Source) -> Source | None:
        """Do what has to be known on the host before `sizes`. Returns the source to encode, or None if a value is not finite."""
        return source

    def encode(self, source: Source, outbox: Outbox, special: torch.Tensor | None, key: tuple[int, int]) -> None:
        """special, int32[1], becomes other than 0 if a value is not finite; None if all are known to be."""
        raise NotImplementedError

    def section(self, fetched: dict[str, np.ndarray]) -> np.ndarray:
        raise NotImplementedError

    def subtract(self, source: Source) -> None:
        """Write what the section does not carry to the source's remainder, unless `encode` has: once it is known to be sent."""

    @staticmethod
    def unpack(section: np.ndarray, n: int) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        raise NotImplementedError

    @staticmethod
    def decode(inbox: Inbox, prefix: str, out: torch.Tensor, bad: torch.Tensor, **options: Any) -> str:
        """Decode to `out`, float32[n], and set `bad`, int32[1], where a code is damaged; returns the message for that."""
        raise NotImplementedError

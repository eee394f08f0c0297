"""Value codecs whose loops have kernels for accelerators: what crosses is what the section holds.

There is one class for each. The host's codec still decides the options, and writes and checks the section's parameters.
"""

import dataclasses
from typing import Any

import numpy as np
import torch

from grace_ext.value.qsgd import OUT_OF_RANGE, QSGD

from .kernels import qsgd
from .kernels._launch import blocks
from .mailbox import Inbox, Outbox


@dataclasses.dataclass(frozen=True)
class Source:
    """What is encoded.

    values: float32[n]; residual: float32[n], which is added to it, or None. positions: int32[n], where the values are in the
    gradient; None for everywhere. remainder: float32[d] for what the codes do not carry, or None.
    """

    values: torch.Tensor
    residual: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    remainder: torch.Tensor | None = None


class DeviceQSGD:
    """QSGD with packed levels: `qsgd` without an entropy code, up to 127 levels and buckets that a program can keep."""

    def __init__(self, codec: QSGD):
        self._codec = codec

    @staticmethod
    def fits(codec: QSGD) -> bool:
        return codec.entropy == "none" and codec.highest <= 127 and codec.bucket <= qsgd.MOST_BUCKET

    def sizes(self, n: int) -> dict[str, int]:
        """Bytes of the sections that `encode` writes for n values."""
        width = (2 * self._codec.highest).bit_length()
        return {"norms": 4 * blocks(n, self._codec.bucket), "codes": blocks(n * width, 8)}

    def encode(self, source: Source, outbox: Outbox, special: torch.Tensor | None, key: tuple[int, int]) -> None:
        norms, codes = outbox.view("norms", torch.float32), outbox.view("codes", torch.uint8)
        qsgd.encode(
            source.values, source.residual, source.positions, source.remainder, norms, codes, special, self._codec,
            self._codec.highest, key,
        )  # fmt: skip

    def section(self, fetched: dict[str, np.ndarray]) -> np.ndarray:
        """The value section, uint8[m], of what was fetched from the outbox."""
        return self._codec.section(fetched["norms"].view(np.float32), fetched["codes"])

    @staticmethod
    def unpack(section: np.ndarray, n: int) -> tuple[dict[str, np.ndarray], dict[str, int]] | None:
        """The parts of a received section, checked, and its parameters; None if kernels can't decode it."""
        levels, bucket, coded, norms, codes = QSGD.parts(section, n)
        if coded or levels > 127 or bucket > qsgd.MOST_BUCKET:
            return None
        return {"norms": norms.view(np.uint8), "codes": codes}, {"levels": levels, "bucket": bucket}

    @staticmethod
    def decode(inbox: Inbox, prefix: str, out: torch.Tensor, bad: torch.Tensor, levels: int, bucket: int) -> str:
        """Decode to `out`, float32[n], and set `bad`, int32[1], where a code is damaged; returns the message for that."""
        norms, codes = inbox.view(f"{prefix} norms", torch.float32), inbox.view(f"{prefix} codes", torch.uint8)
        qsgd.decode(codes, norms, out, bad, levels, bucket)
        return OUT_OF_RANGE


#: By the codec's class.
CODECS: dict[type, Any] = {QSGD: DeviceQSGD}
_BY_ID = {codec.id: device_codec for codec, device_codec in CODECS.items()}


def find(codec: Any) -> Any:
    """What encodes on the device in place of a value codec of the host, or None."""
    device_codec = CODECS.get(type(codec))
    return device_codec(codec) if device_codec is not None and device_codec.fits(codec) else None


def find_decoder(id: int) -> Any:
    """The class that decodes sections of a value codec on the device, or None."""
    return _BY_ID.get(id)

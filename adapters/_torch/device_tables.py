"""Value codecs with kernels whose sections are not of one size: `threelc`, and those whose levels have values in a table.

Their levels cross at a fixed width; an entropy code, and a fold of what is left, are the host's. See device_values.py.
"""

import numpy as np
import torch

from grace_ext.errors import ContainerError
from grace_ext.kernels.levels import unpack_levels_fixed
from grace_ext.kernels.lloyd import FRACTIONS, HEAD, MOST, choose_from_counts
from grace_ext.kernels.ternary import unfold_zeros
from grace_ext.value._levels import pack_levels, unpack_levels
from grace_ext.value.lloyd import Lloyd
from grace_ext.value.threelc import ThreeLC

from .device_codec import DeviceCodec
from .kernels import lloyd, sketchml, tables, ternary, threelc
from .kernels._launch import blocks
from .mailbox import to_device, to_host


def _width(alphabet: int) -> int:
    """Bits of a level, as pack_levels has them."""
    return max(1, (alphabet - 1).bit_length())


def _levels_of(packed: np.ndarray, width: int, n: int) -> np.ndarray:
    levels = np.empty(n, np.uint8)
    unpack_levels_fixed(packed, width, levels)
    return levels


class DeviceThreeLC(DeviceCodec):
    """`threelc`. The kernels fold the zeros, so that what crosses is the section."""

    def __init__(self, codec: ThreeLC):
        super().__init__(codec)
        self._folded: int | None = None

    def sizes(self, n):
        return {"section": 4 + (blocks(n, 5) if self._folded is None else self._folded)}

    def prepare(self, source):
        device = source.values.device
        found = torch.empty(2, dtype=torch.int32, device=device)
        special, self._scale = torch.zeros(1, dtype=torch.int32, device=device), torch.empty(1, device=device)
        packed = threelc.encode(source, found, self._codec.s, self._scale, special)
        self._bytes, count = threelc.fold(packed)
        self._folded, is_special = to_host(torch.cat([count, special])).tolist()
        return None if is_special else source.without_residual()

    def encode(self, source, outbox, special, key):
        section = outbox.view("section", torch.uint8)
        section[:4].copy_(self._scale.view(torch.uint8))
        section[4:].copy_(self._bytes[: self._folded])

    def section(self, fetched):
        return fetched["section"]

    @staticmethod
    def unpack(section, n):
        packed = np.empty(blocks(n, 5), np.uint8)
        if section.size < 4 or not 0 <= section[:4].view("<f4")[0] < np.inf or not unfold_zeros(section[4:], packed):
            return None
        return {"scale": section[:4], "digits": packed}, {}

    @staticmethod
    def decode(inbox, prefix, out, bad):
        digits, scale = inbox.view(f"{prefix} digits", torch.uint8), inbox.view(f"{prefix} scale", torch.float32)
        ternary.decode(digits, scale, out, bad)
        return f"threelc: the section does not hold {out.numel()} ternary digits"


class DeviceSketchML(DeviceCodec):
    """`sketchml`."""

    def sizes(self, n):
        width = _width(self._codec.buckets)
        return {"range": 8, "used": 4, "means": 4 * sketchml.BUCKETS, "levels": blocks(n * width, 8)}

    def encode(self, source, outbox, special, key):
        means, used = outbox.view("means", torch.float32), outbox.view("used", torch.int32)
        found = outbox.view("range", torch.int32)
        levels, source = sketchml.encode(source, found, self._codec.buckets, means, used, special)
        tables.pack(levels, outbox.view("levels", torch.uint8), _width(self._codec.buckets))
        if source.remainder is not None:
            tables.subtract(source, levels, means)
        self._n = levels.numel()

    def section(self, fetched):
        used, width = int(fetched["used"].view(np.int32)[0]), _width(self._codec.buckets)
        head = [np.array([used - 1], np.uint8), fetched["means"][: 4 * used]]
        if self._codec.entropy == "none" and width == _width(used):
            return np.concatenate([*head, np.zeros(1, np.uint8), fetched["levels"]])
        return np.concatenate([*head, pack_levels(_levels_of(fetched["levels"], width, self._n), used, self._codec.entropy)])

    @staticmethod
    def unpack(section, n):
        used = int(section[0]) + 1 if section.size else 0
        if not used or section.size < 1 + 4 * used or not np.isfinite(section[1 : 1 + 4 * used].view("<f4")).all():
            return None
        levels, means = np.empty(n, np.uint8), np.zeros(4 * sketchml.BUCKETS, np.uint8)
        try:
            unpack_levels(section[1 + 4 * used :], used, levels)
        except ContainerError:
            return None
        means[: 4 * used] = section[1 : 1 + 4 * used]
        return {"levels": levels, "means": means}, {}

    @staticmethod
    def decode(inbox, prefix, out, bad):
        tables.decode(inbox.view(f"{prefix} levels", torch.uint8), inbox.view(f"{prefix} means", torch.float32), out)
        return ""


_ALL_LEVELS = np.arange(256, dtype=np.uint8)


class DeviceLloyd(DeviceCodec):
    """`lloyd`. The host searches for the levels in a histogram; values beyond them cross once more, as float32."""

    _HEAD = HEAD + FRACTIONS

    def __init__(self, codec: Lloyd):
        super().__init__(codec)
        self._bits = 8

    def sizes(self, n):
        return {"beyond": 4, "levels": blocks(n * self._bits, 8)}

    def prepare(self, source):
        source, moments, counts, total = lloyd.moments_and_counts(source, self._codec.error)
        if moments is None:
            return None
        self._head, places = np.empty(self._HEAD, np.uint8), np.empty(2, np.float32)
        n = source.values.numel()
        self._most = choose_from_counts(counts, total, n, moments, self._codec.error, self._head, places)
        self._bits = _width(2 * self._most + 1)
        table = np.empty(256, np.float32)
        Lloyd.values_of(self._head, self._most, _ALL_LEVELS, table)
        self._places, self._table = to_device(np.concatenate([places, table]), source.values.device).split([2, 256])
        return source

    def encode(self, source, outbox, special, key):
        self._levels = lloyd.quantize(source, self._places, self._most, outbox.view("beyond", torch.int32))
        self._values = source.values
        tables.pack(self._levels, outbox.view("levels", torch.uint8), self._bits)

    def section(self, fetched):
        levels = _levels_of(fetched["levels"], self._bits, self._levels.numel())
        beyond = int(fetched["beyond"].view(np.int32)[0])
        head = self._head[: HEAD + min(self._most, FRACTIONS)].copy()
        escapes = np.empty(0, np.uint8)
        if beyond:
            head[9:13] = np.array([beyond], "<u4").view(np.uint8)
            at = to_device(np.flatnonzero(levels == lloyd.ESCAPE), self._values.device)
            escapes = to_host(self._values[at]).view(np.uint8)
        return np.concatenate([head, escapes, pack_levels(levels, 2 * self._most + 1 + (beyond > 0), self._codec.entropy)])

    def subtract(self, source):
        if source.remainder is not None:
            tables.subtract(source, self._levels, self._table, lloyd.ESCAPE if self._most == MOST else tables.NO_ESCAPE)

    @staticmethod
    def unpack(section, n):
        try:
            most, head, escapes, levels = Lloyd.parts(section, n)
        except ContainerError:
            return None
        at = np.flatnonzero(levels == lloyd.ESCAPE) if escapes.size else np.empty(0, np.int64)
        if at.size != escapes.size:
            return None
        table = np.empty(256, np.float32)
        Lloyd.values_of(head, most, _ALL_LEVELS, table)
        arrays = {"levels": levels.copy(), "table": table, "places": at.astype(np.int32), "escapes": escapes}
        return {name: array.view(np.uint8) for name, array in arrays.items()}, {}

    @staticmethod
    def decode(inbox, prefix, out, bad):
        tables.decode(inbox.view(f"{prefix} levels", torch.uint8), inbox.view(f"{prefix} table", torch.float32), out)
        at, escapes = inbox.view(f"{prefix} places", torch.int32), inbox.view(f"{prefix} escapes", torch.float32)
        if at.numel():
            out[at.long()] = escapes
        return ""

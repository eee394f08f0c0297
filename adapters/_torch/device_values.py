"""Value codecs whose loops have kernels for accelerators: what crosses is what the section holds.

There is one class for each. The host's codec still decides the options, and checks the section's parameters.
"""

import dataclasses
from typing import Any

import numpy as np
import torch

from grace_ext.kernels.levels import unpack_levels_fixed
from grace_ext.value._buckets import to_byte
from grace_ext.value._levels import pack_levels
from grace_ext.value.bfloat import BFloat16
from grace_ext.value.half import Half
from grace_ext.value.lloyd import Lloyd
from grace_ext.value.minmax import MinMax
from grace_ext.value.natural import LAST, Natural
from grace_ext.value.onebit import OneBit
from grace_ext.value.qsgd import OUT_OF_RANGE, QSGD
from grace_ext.value.sign import Sign
from grace_ext.value.sketchml import SketchML
from grace_ext.value.terngrad import TernGrad
from grace_ext.value.threelc import ThreeLC

from .device_codec import DeviceCodec
from .device_tables import DeviceLloyd, DeviceSketchML, DeviceThreeLC
from .kernels import half, minmax, natural, qsgd, ranges, signs, ternary
from .kernels._launch import blocks
from .mailbox import to_device


class DeviceQSGD(DeviceCodec):
    """`qsgd` without an entropy code, up to 127 levels and buckets that a program can keep."""

    @staticmethod
    def fits(codec: QSGD) -> bool:
        return codec.entropy == "none" and codec.highest <= 127 and codec.bucket <= qsgd.MOST_BUCKET

    def sizes(self, n: int) -> dict[str, int]:
        width = (2 * self._codec.highest).bit_length()
        return {"norms": 4 * blocks(n, self._codec.bucket), "codes": blocks(n * width, 8)}

    def encode(self, source, outbox, special, key):
        norms, codes = outbox.view("norms", torch.float32), outbox.view("codes", torch.uint8)
        qsgd.encode(source, norms, codes, special, self._codec, key)

    def section(self, fetched):
        return self._codec.section(fetched["norms"].view(np.float32), fetched["codes"])

    @staticmethod
    def unpack(section, n):
        levels, bucket, coded, norms, codes = QSGD.parts(section, n)
        if coded or levels > 127 or bucket > qsgd.MOST_BUCKET:
            return None
        return {"norms": norms.view(np.uint8), "codes": codes}, {"levels": levels, "bucket": bucket}

    @staticmethod
    def decode(inbox, prefix, out, bad, levels, bucket):
        norms, codes = inbox.view(f"{prefix} norms", torch.float32), inbox.view(f"{prefix} codes", torch.uint8)
        qsgd.decode(codes, norms, out, bad, levels, bucket)
        return OUT_OF_RANGE


class DeviceOneBit(DeviceCodec):
    """`onebit` with buckets that a program can keep."""

    @staticmethod
    def fits(codec: OneBit) -> bool:
        return 0 < codec.bucket <= signs.MOST_BUCKET

    def sizes(self, n: int) -> dict[str, int]:
        return {"means": 8 * blocks(n, self._codec.bucket), "signs": blocks(n, 8)}

    def encode(self, source, outbox, special, key):
        means, bits = outbox.view("means", torch.float32), outbox.view("signs", torch.uint8)
        signs.encode(source, means, bits, special, self._codec.bucket)

    def section(self, fetched):
        return np.concatenate([np.array([to_byte(self._codec.bucket)], np.uint8), fetched["means"], fetched["signs"]])

    @staticmethod
    def unpack(section, n):
        bucket, means, bits = OneBit.parts(section, n)
        if not 8 <= bucket <= signs.MOST_BUCKET or bucket & (bucket - 1):  # one bucket of all values can have any size
            return None
        return {"means": means.reshape(-1).view(np.uint8), "signs": bits}, {"bucket": bucket}

    @staticmethod
    def decode(inbox, prefix, out, bad, bucket):
        means, bits = inbox.view(f"{prefix} means", torch.float32), inbox.view(f"{prefix} signs", torch.uint8)
        signs.decode(bits, means, out, bucket)
        return ""


class DeviceSign(DeviceCodec):
    """`sign` with buckets that a program can keep, and `sign:one`: by the kernels of `onebit`, whose means give the scales."""

    _WITHOUT = 512  # the bucket where there are no scales

    @staticmethod
    def fits(codec: Sign) -> bool:
        return codec.scale == "one" or 0 < codec.bucket <= signs.MOST_BUCKET

    @property
    def _bucket(self) -> int:
        return self._codec.bucket if self._codec.scale == "mean" else self._WITHOUT

    def sizes(self, n: int) -> dict[str, int]:
        return {"means": 8 * blocks(n, self._bucket), "signs": blocks(n, 8)}

    def prepare(self, source):
        if source.residual is not None:
            source.values.add_(source.residual)
        return source.without_residual()

    def encode(self, source, outbox, special, key):
        means, bits = outbox.view("means", torch.float32), outbox.view("signs", torch.uint8)
        self._n = source.values.numel()
        signs.encode(dataclasses.replace(source, remainder=None), means, bits, special, self._bucket)

    def section(self, fetched):
        means, bits = fetched["means"].view(np.float32).reshape(-1, 2), fetched["signs"]
        self._scales, section = self._codec.section(means, bits, self._n)
        return section

    def subtract(self, source):
        if source.remainder is None:
            return
        scales = to_device(self._scales, source.values.device).repeat_interleave(self._bucket)[: self._n]
        source.keep(source.values - torch.where(source.values < 0, -scales, scales))

    @classmethod
    def unpack(cls, section, n):
        bucket, scales, bits = Sign.parts(section, n)
        if scales is None:
            bucket, scales = cls._WITHOUT, np.ones(blocks(n, cls._WITHOUT), np.float32)
        if not 8 <= bucket <= signs.MOST_BUCKET or bucket & (bucket - 1):  # one bucket of all values can have any size
            return None
        return {"means": np.stack([scales, -scales], axis=1).reshape(-1).view(np.uint8), "signs": bits}, {"bucket": bucket}

    decode = staticmethod(DeviceOneBit.decode)


class DeviceHalf(DeviceCodec):
    """`fp16`."""

    brain = False

    def sizes(self, n: int) -> dict[str, int]:
        return {"halves": 2 * n}

    def encode(self, source, outbox, special, key):
        half.encode(source, outbox.view("halves", torch.int16), special, self.brain)

    def section(self, fetched):
        return fetched["halves"]

    @classmethod
    def unpack(cls, section, n):
        return ({"halves": section}, {"brain": cls.brain}) if section.size == 2 * n else None

    @staticmethod
    def decode(inbox, prefix, out, bad, brain):
        half.decode(inbox.view(f"{prefix} halves", torch.int16), out, brain)
        return ""


class DeviceBFloat16(DeviceHalf):
    """`bf16`."""

    brain = True


class DeviceTernGrad(DeviceCodec):
    """`terngrad` with one scale for all values, and five digits in a byte."""

    @staticmethod
    def fits(codec: TernGrad) -> bool:
        return codec.bucket == 0 and codec.packing == "trits"

    def sizes(self, n: int) -> dict[str, int]:
        return {"range": 8, "norm": 4, "digits": blocks(n, 5)}

    def encode(self, source, outbox, special, key):
        found = outbox.view("range", torch.int32)
        source = ranges.find(source, found, special)
        ternary.encode(source, found, outbox.view("norm", torch.float32), outbox.view("digits", torch.uint8), key)

    def section(self, fetched):
        return np.concatenate([np.zeros(2, np.uint8), fetched["norm"], fetched["digits"]])

    @staticmethod
    def unpack(section, n):
        if section.size != 6 + blocks(n, 5) or section[:2].any() or not 0 <= section[2:6].view("<f4")[0] < np.inf:
            return None
        return {"norm": section[2:6], "digits": section[6:]}, {}

    @staticmethod
    def decode(inbox, prefix, out, bad):
        digits, norm = inbox.view(f"{prefix} digits", torch.uint8), inbox.view(f"{prefix} norm", torch.float32)
        ternary.decode(digits, norm, out, bad)
        return f"terngrad: the section does not hold {out.numel()} ternary digits"


class DeviceMinMax(DeviceCodec):
    """`minmax` without an entropy code, with one range for all values or for chunks that a program can keep."""

    _HEAD = 5  # bits and the size of a chunk; both extremes of each chunk follow, and the mode of the levels

    @staticmethod
    def fits(codec: MinMax) -> bool:
        return codec.chunk <= minmax.MOST_CHUNK and codec.entropy == "none" and not codec.needs_chunks

    def sizes(self, n: int) -> dict[str, int]:
        chunks = blocks(n, self._codec.chunk) if self._codec.chunk else 1
        return {"range": 8, "extremes": 8 * chunks, "levels": blocks(n * self._codec.bits, 8)}

    def encode(self, source, outbox, special, key):
        extremes, levels = outbox.view("extremes", torch.float32), outbox.view("levels", torch.uint8)
        if self._codec.chunk:
            minmax.encode_of_chunks(source, extremes, levels, special, self._codec.bits, self._codec.chunk)
        else:
            found = outbox.view("range", torch.int32)
            minmax.encode(ranges.find(source, found, special), found, extremes, levels, self._codec.bits)

    def section(self, fetched):
        head = [np.array([self._codec.bits], np.uint8), np.array([self._codec.chunk], "<u4").view(np.uint8)]
        return np.concatenate([*head, fetched["extremes"], np.zeros(1, np.uint8), fetched["levels"]])

    @classmethod
    def unpack(cls, section, n):
        bits, chunk = int(section[0]) if section.size else 0, int.from_bytes(section[1 : cls._HEAD].tobytes(), "little")
        mode = cls._HEAD + 8 * (blocks(n, chunk) if chunk else 1)
        if not 1 <= bits <= 8 or section.size != mode + 1 + blocks(n * bits, 8) or section[mode]:
            return None
        extremes = section[cls._HEAD : mode].view("<f4").reshape(-1, 2)
        if (
            not np.isfinite(extremes).all()
            or (extremes[:, 0] > extremes[:, 1]).any()
            or int(section[-1]) >> 8 - -n * bits % 8
        ):
            return None
        return {"extremes": section[cls._HEAD : mode], "levels": section[mode + 1 :]}, {"bits": bits, "chunk": chunk}

    @staticmethod
    def decode(inbox, prefix, out, bad, bits, chunk):
        levels, extremes = inbox.view(f"{prefix} levels", torch.uint8), inbox.view(f"{prefix} extremes", torch.float32)
        if chunk:
            minmax.decode_of_chunks(levels, extremes, out, bits, chunk)
        else:
            minmax.decode(levels, extremes, out, bits)
        return ""


class DeviceNatural(DeviceCodec):
    """`natural` without an entropy code."""

    _HEAD = 3  # the smallest exponent, how many there are, and the mode of the levels

    @staticmethod
    def fits(codec: Natural) -> bool:
        return codec.entropy == "none"

    @staticmethod
    def _width(count: int) -> int:
        return max(1, (2 * count).bit_length())

    def sizes(self, n: int) -> dict[str, int]:
        return {"range": 8, "exponents": 8, "levels": blocks(n * self._codec.bits, 8)}

    def encode(self, source, outbox, special, key):
        self._n = source.values.numel()
        found, exponents = outbox.view("range", torch.int32), outbox.view("exponents", torch.int32)
        natural.encode(source, found, exponents, outbox.view("levels", torch.uint8), special, self._codec.bits, key)

    def section(self, fetched):
        lowest, count = fetched["exponents"].view(np.int32).tolist()
        head, packed = np.array([lowest, count, 0], np.uint8), fetched["levels"]
        if self._width(count) != self._codec.bits:  # the values span fewer exponents than there are levels for
            levels = np.empty(self._n, np.uint8)
            unpack_levels_fixed(packed, self._codec.bits, levels)
            return np.concatenate([head[:2], pack_levels(levels, 2 * count + 1, "none")])
        return np.concatenate([head, packed])

    @classmethod
    def unpack(cls, section, n):
        if section.size <= cls._HEAD or section[2] or section[0] == 0:
            return None
        lowest, count = int(section[0]), int(section[1])
        width = cls._width(count)
        if count > 127 or lowest + count > LAST + 1 or section.size != cls._HEAD + blocks(n * width, 8):
            return None
        if int(section[-1]) >> 8 - -n * width % 8:
            return None
        return {"levels": section[cls._HEAD :]}, {"lowest": lowest, "count": count}

    @classmethod
    def decode(cls, inbox, prefix, out, bad, lowest, count):
        natural.decode(inbox.view(f"{prefix} levels", torch.uint8), out, bad, lowest, count, cls._width(count))
        return "levels: a level is out of range"


#: By the codec's class.
CODECS: dict[type, Any] = {
    QSGD: DeviceQSGD,
    OneBit: DeviceOneBit,
    Sign: DeviceSign,
    Half: DeviceHalf,
    BFloat16: DeviceBFloat16,
    TernGrad: DeviceTernGrad,
    MinMax: DeviceMinMax,
    Natural: DeviceNatural,
    ThreeLC: DeviceThreeLC,
    SketchML: DeviceSketchML,
    Lloyd: DeviceLloyd,
}
_BY_ID = {codec.id: device_codec for codec, device_codec in CODECS.items()}


def find(codec: Any) -> Any:
    """What encodes on the device in place of a value codec of the host, or None."""
    device_codec = CODECS.get(type(codec))
    return device_codec(codec) if device_codec is not None and device_codec.fits(codec) else None


def find_decoder(id: int) -> Any:
    """The class that decodes sections of a value codec on the device, or None."""
    return _BY_ID.get(id)

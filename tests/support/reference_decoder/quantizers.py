"""The second decoder, continued: value sections of the quantizers, written from docs/container-format.md alone."""

import math
import struct

import numpy as np

from support import reference_kernels
from support.reference_decoder.levels import levels


def bf16(section, k):
    return [struct.unpack("<f", bytes(2) + section[2 * i : 2 * i + 2])[0] for i in range(k)]


def minmax(section, k):
    bits, chunk = struct.unpack_from("<BI", section)
    chunk = chunk or k
    count = math.ceil(k / chunk)
    ranges = struct.unpack_from(f"<{2 * count}f", section, 5)
    found = []
    for i, level in enumerate(levels(section[5 + 8 * count :], 2**bits, k)):
        low, high = ranges[2 * (i // chunk) :][:2]
        found.append(float(np.float32(low + level * ((high - low) / (2**bits - 1)))))
    return found


def scales(section, k, a_bucket):
    """(size of a bucket, `a_bucket` numbers for each bucket) of a section that begins with the byte n."""
    bucket = 1 << section[0] if section[0] else k
    return bucket, a_bucket * math.ceil(k / bucket)


def digits(packed, k):
    found = [byte // 3**place % 3 for byte in packed for place in (4, 3, 2, 1, 0)]
    assert len(found) == 5 * math.ceil(k / 5) and set(found[k:]) <= {1}
    return found[:k]


def times(digit, scale):
    return float(np.float32(digit - 1) * np.float32(scale))


def terngrad(section, k):
    bucket, count = scales(section, k, 1)
    norms = struct.unpack_from(f"<{count}f", section, 2)
    body = section[2 + 4 * count :]
    ternary = levels(body, 3, k) if section[1] else digits(body, k)
    return [times(digit, norms[i // bucket]) for i, digit in enumerate(ternary)]


def onebit(section, k):
    bucket, count = scales(section, k, 2)
    means = struct.unpack_from(f"<{count}f", section, 1)
    bits = reference_kernels.unpack(section[1 + 4 * count :], 1, k)
    return [means[2 * (i // bucket) + bit] for i, bit in enumerate(bits)]


def sign(section, k):
    bucket, count = (k, 0) if section[0] == 1 else scales(section, k, 1)
    found = struct.unpack_from(f"<{count}f", section, 1) or (1.0,)
    bits = reference_kernels.unpack(section[1 + 4 * count :], 1, k)
    return [-found[i // bucket] if bit else found[i // bucket] for i, bit in enumerate(bits)]


def inceptionn(section, k):
    head = 1 + math.ceil(k / 4)
    tags = levels(section[:head], 4, k)
    found, at = [0.0] * k, head
    for tag, form in ((3, "f"), (2, "H"), (1, "B")):
        for i in (i for i in range(k) if tags[i] == tag):
            (code,) = struct.unpack_from(f"<{form}", section, at)
            at += struct.calcsize(form)
            bits = 8 * struct.calcsize(form)
            if tag != 3:
                negative, fraction = divmod(code, 2 ** (bits - 1))
                code = (-1 if negative else 1) * (fraction or 0.5) / 2 ** (bits - 2)
            found[i] = code
    assert at == len(section)
    return found


def natural(section, k):
    exponent, count = section[:2]
    powers = [level - count for level in levels(section[2:], 2 * count + 1, k)]
    return [math.copysign(2.0 ** (exponent + abs(j) - 128), j) if j else 0.0 for j in powers]


def threelc(section, k):
    (scale,) = struct.unpack_from("<f", section)
    packed = b"".join(bytes([121] * (byte - 241)) if byte > 242 else bytes([byte]) for byte in section[4:])
    return [times(digit, scale) for digit in digits(packed, k)]


VALUE = {5: bf16, 6: minmax, 7: terngrad, 8: onebit, 9: natural, 13: threelc, 16: sign, 17: inceptionn}

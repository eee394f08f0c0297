"""The second decoder, continued: value sections of the quantizers, written from docs/container-format.md alone."""

import struct


def bf16(section, k):
    return [struct.unpack("<f", bytes(2) + section[2 * i:2 * i + 2])[0] for i in range(k)]


VALUE = {5: bf16}

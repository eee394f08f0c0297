"""Part of the second decoder (reference.py): positions that are drawn from a key. Written from docs/container-format.md."""

import struct

import twins_sparse


def shared(section, d, k):
    low, high = struct.unpack("<II", section)
    return twins_sparse.draw_positions(k, d, low, high)


INDEX = {10: shared}
VALUE = {}

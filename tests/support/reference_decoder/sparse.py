"""Part of the second decoder (reference.py): positions that are drawn from a key. Written from docs/container-format.md."""

import struct

from support.reference_kernels import sparse as reference_sparse


def shared(section, d, k):
    low, high = struct.unpack("<II", section)
    return reference_sparse.draw_positions(k, d, low, high)


INDEX = {10: shared}
VALUE = {}

"""Huffman codes of gap classes: half of the bound for random positions where real gradients cluster.

Huffman, A method for the construction of minimum-redundancy codes, 1952; scheme=bytes as in DeepReduce (Kostopoulou et
al., 2021).
"""

import numpy as np

from ..errors import ContainerError
from ..kernels.gap_huffman import CLASSES, CONTEXTS, ROW, gap_huffman_decode, gap_huffman_encode, plan_gap_codes
from ..registry import register
from .base import IndexCodec
from .gaps import Gaps


@register
class Huffman(IndexCodec):
    name, id = "huffman", 5

    def encode(self, indices, d):
        rows, classes, size, lengths = _plan(Gaps(indices, d))
        payload = np.empty(size + 8, np.uint8)
        payload[:2] = rows, classes
        gap_huffman_encode(indices, lengths, rows, classes, payload[2:])
        return payload[:size], indices

    def size(self, indices, d):
        return self.size_from(Gaps(indices, d))

    def size_from(self, gaps):
        return _plan(gaps)[2]

    @staticmethod
    def decode(payload, d, out):
        if payload.size < 3 or payload[0] not in (1, CONTEXTS) or not 1 <= payload[1] <= CLASSES:
            raise ContainerError("huffman: the scheme or the number of classes is missing or out of range")
        if not gap_huffman_decode(payload[2:], int(payload[0]), int(payload[1]), d, out):
            raise ContainerError(f"huffman: the section is not tables and codes of {out.size} positions below {d}")


def _plan(gaps):
    """(rows, classes, bytes of the section, lengths of the codes)."""
    lengths = np.empty(CONTEXTS * ROW, np.uint8)
    rows, classes, bits = plan_gap_codes(gaps.counts, lengths)
    return rows, classes, 2 + (bits + 7) // 8, lengths

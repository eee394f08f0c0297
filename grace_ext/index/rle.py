"""Index codec `rle`."""

import numpy as np

from .._util.scratch import scratch
from ..errors import ContainerError
from ..kernels._helpers import MAX_SHIFT
from ..kernels.runs import GOLOMB, best_run_code, fill_runs, numbers_decode, numbers_encode, runs_of
from ..registry import register
from ._gaps import GapCounts
from .base import IndexCodec

_HEAD = 10  # bytes: the two codes, the number of pairs of runs, and the number of bytes of the prefixes


@register
class RunLength(IndexCodec):
    """Lengths of the bitmap's runs of zeros and ones: the shortest where positions form long blocks, such as whole rows.

    The payload names a code for each kind of run and holds a stream of prefixes and a stream of suffixes
    (docs/container-format.md, "Runs").

    Source:
        Bit-level RLE as in DeepReduce (Xu et al., 2021), with codes for the runs, which the paper leaves open: those of Rice
        and Plaunt, Some practical universal noiseless coding techniques, 1971, or exp-Golomb codes, Teuhola, A compression
        method for clustered bit-vectors, 1978.
    """

    name, id = "rle", 4

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        zeros, ones, zeros_code, ones_code, prefix_bytes, suffix_bytes = _plan(indices)
        split, end = _HEAD + prefix_bytes, _HEAD + prefix_bytes + suffix_bytes
        payload = np.empty(end + 8, np.uint8)
        payload[:2] = zeros_code, ones_code
        payload[2:_HEAD].view("<u4")[:] = zeros.size, prefix_bytes
        suffixes = scratch("suffixes", np.uint8, suffix_bytes + 8)
        bits = numbers_encode(zeros, zeros_code, 0, 0, payload[_HEAD:], suffixes)
        numbers_encode(ones, ones_code, *bits, payload[_HEAD:], suffixes)
        payload[split:end] = suffixes[:suffix_bytes]
        return payload[:end], indices

    def size(self, indices: np.ndarray, d: int) -> int:
        *_, prefix_bytes, suffix_bytes = _plan(indices)
        return _HEAD + prefix_bytes + suffix_bytes

    def size_lower_bound(self, gaps: GapCounts) -> int:
        runs = gaps.indices.size - int(gaps.classes[0])  # each run of ones takes at least one bit
        return _HEAD + (gaps.run_bits + runs) // 8

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if payload.size < _HEAD or (payload[:2] % GOLOMB > MAX_SHIFT).any():
            raise ContainerError("rle: the codes are missing or out of range")
        pairs, prefix_bytes = np.frombuffer(payload[2:_HEAD], "<u4").tolist()
        if not 1 <= pairs <= out.size or prefix_bytes > payload.size - _HEAD:
            raise ContainerError(f"rle: {pairs} pairs of runs in {payload.size} bytes cannot be {out.size} positions")
        prefixes, suffixes = np.split(payload[_HEAD:], [prefix_bytes])
        bits = 0, 0
        runs = [scratch(name, np.uint32, pairs) for name in _RUNS]
        for lengths, code in zip(runs, payload[:2].tolist(), strict=True):
            bits = numbers_decode(prefixes, suffixes, *bits, code, d, lengths)
            if bits[0] < 0:
                raise ContainerError(f"rle: the section is not {pairs} pairs of runs below {d}")
        if not (fill_runs(*runs, d, out) and _ends(prefixes, bits[0]) and _ends(suffixes, bits[1])):
            raise ContainerError(f"rle: the runs are not {out.size} positions below {d}")


_RUNS = ("runs of zeros", "runs of ones")


def _plan(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int, int, int]:
    """Return (runs of zeros, runs of ones, code of each, bytes of the prefixes, bytes of the suffixes)."""
    zeros, ones = (scratch(name, np.uint32, indices.size) for name in _RUNS)
    pairs = runs_of(indices, zeros, ones)
    zeros, ones = zeros[:pairs], ones[:pairs]
    sample = np.empty(min(pairs, 4096), np.uint32)
    zeros_code, *zeros_bits = best_run_code(zeros, sample)
    ones_code, *ones_bits = best_run_code(ones, sample)
    prefix_bytes, suffix_bytes = ((a + b + 7) // 8 for a, b in zip(zeros_bits, ones_bits, strict=True))
    return zeros, ones, zeros_code, ones_code, prefix_bytes, suffix_bytes


def _ends(stream: np.ndarray, bits: int) -> bool:
    """Return whether uint8[m] is exactly so many bits long, with zeros in the rest of its last byte."""
    return (bits + 7) // 8 == stream.size and (bits % 8 == 0 or int(stream[-1]) >> bits % 8 == 0)

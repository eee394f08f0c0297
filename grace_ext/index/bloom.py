"""Index codec `bloom`."""

import math

import numpy as np
import xxhash

from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.bloom import bloom_choose, bloom_count, bloom_insert, bloom_positions, bloom_query, bloom_scores
from ..registry import register
from .base import IndexCodec

POLICIES = ("p0", "p1", "p2", "leftmost", "middle", "rightmost", "naive")  # the payload holds the number
MIN_FPR, MAX_FPR = 1e-6, 0.9
MAX_HASHES = 16
_HEAD = 6  # bytes before the filter


def filter_size(r: int, fpr: float) -> tuple[int, int]:
    """Return the size of a filter for r positions.

    Args:
        r: Number of positions.
        fpr: The rate of false positives.

    Returns:
        The number of hash functions (Remark 2 of the paper) and the number of 64-bit words (Lemma 3).
    """
    hashes = min(MAX_HASHES, max(1, round(-math.log2(fpr))))
    bits = -hashes * r / math.log1p(-(fpr ** (1 / hashes)))
    return hashes, math.ceil(bits / 64)


@register
class Bloom(IndexCodec):
    """A Bloom filter of the positions, and a policy that decides which of its positives are the support. It is lossy.

    The number of hash functions is that of the paper's Remark 2, log2(1 / fpr), rounded, and at most 16 (which limits it
    where fpr is below 1e-5). The size of the filter is the one that reaches fpr with this number (Lemma 3). The hash
    functions are the 32-bit finalizer of MurmurHash3, applied to a group of 64 positions instead of to each one: 64
    positions are queried with as many memory accesses as one would need, at the same rate of false positives
    (kernels/bloom.py explains how). Policy p2 scores every positive by the sizes of all conflict sets that it is in, and
    takes the highest scores; the paper draws from one set after the other, the smallest first. On every gradient that was
    measured, the codec needs more bits than the lossless ones.

    The payload holds the policy, the number of hash functions, a seed and the filter (docs/container-format.md, "Bloom
    filters").

    Args:
        policy: What receivers rebuild from the positives. p0: all of them. The others take r of them, as many as were
            selected: p1 at random, p2 by their conflict sets; leftmost, middle and rightmost by position; naive the first r,
            but with the values of the selected positions in order, so that values are shifted (for study only).
        fpr: The share of false positives among the positions that are not selected, 1e-6 to 0.9.
        seed: Seed of the hash functions and of random choices, 0 to 2**32 - 1.

    Source:
        Xu et al., DeepReduce: A Sparse-tensor Communication Framework for Federated Deep Learning, NeurIPS 2021, section 4
        and appendix B; Bloom, Space/time trade-offs in hash coding with allowable errors, 1970.
    """

    name, id = "bloom", 9
    sweep = {"policy": ("p0", "p1", "p2"), "fpr": (0.001, 0.01)}
    lossless = False

    def __init__(self, policy: str = "p0", fpr: float = 0.001, seed: int = 0):
        if policy not in POLICIES:
            raise ConfigError(f"bloom: policy={policy!r}; allowed: {', '.join(POLICIES)}")
        if not MIN_FPR <= fpr <= MAX_FPR:
            raise ConfigError(f"bloom: fpr={fpr}; allowed: {MIN_FPR} to {MAX_FPR} (at most {MAX_HASHES} hash functions)")
        if not 0 <= seed < 2**32:
            raise ConfigError(f"bloom: seed={seed}; allowed: 0 to 2**32 - 1")
        self.policy = policy
        self.fpr = fpr
        self.seed = seed

    @property
    def remaps_values(self) -> bool:  # type: ignore[override]
        """Whether values are shifted to other positions, as under the policy `naive`."""
        return self.policy == "naive"

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        hashes, size = filter_size(indices.size, self.fpr)
        # Every support has a seed of its own, so that a position that loses in one step does not lose again in the next.
        seed = np.uint32(xxhash.xxh64_intdigest(indices.astype("<u4"), self.seed) & 0xFFFFFFFF)
        words = np.zeros(size, np.uint64)
        bloom_insert(indices, -(-d // 64), hashes, seed, words)
        head = np.array([POLICIES.index(self.policy), hashes, *seed.astype("<u4").tobytes()], np.uint8)
        payload = np.concatenate([head, words.astype("<u8").view(np.uint8)])
        filter_ = _Filter(words, d, hashes, seed)
        support = np.empty(filter_.count if self.policy == "p0" else indices.size, np.uint32)
        filter_.support(self.policy, support)
        return payload, support

    def size(self, indices: np.ndarray, d: int) -> int:
        return _HEAD + 8 * filter_size(indices.size, self.fpr)[1]

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if payload.size < _HEAD + 8 or payload.size % 8 != _HEAD or payload[0] >= len(POLICIES):
            raise ContainerError("bloom: the parameters or the filter are missing or of no known kind")
        policy, hashes = POLICIES[payload[0]], int(payload[1])
        if not 1 <= hashes <= MAX_HASHES:
            raise ContainerError(f"bloom: {hashes} hash functions; allowed: 1 to {MAX_HASHES}")
        if payload.size > 4 * out.size + 64:
            raise ContainerError(f"bloom: {payload.size} bytes for {out.size} positions, more than raw would need")
        seed = np.uint32(int.from_bytes(payload[2:_HEAD].tobytes(), "little"))
        words = np.frombuffer(payload[_HEAD:].tobytes(), "<u8").astype(np.uint64, copy=False)
        filter_ = _Filter(words, d, hashes, seed)
        if filter_.count < out.size or (policy == "p0" and filter_.count != out.size):
            raise ContainerError(f"bloom: {filter_.count} positives cannot give {out.size} positions under {policy}")
        filter_.support(policy, out)


class _Filter:
    """A filter that has been queried for all d positions; `count` is the number of positives."""

    def __init__(self, words: np.ndarray, d: int, hashes: int, seed: np.uint32):
        self.words, self.d, self.hashes, self.seed = words, d, hashes, seed
        self.stride = -(-d // 64)
        # Rows are an odd number of cache lines apart: the 64 that are written in turn must not share a set of the cache.
        row = (self.stride + 511) // 512 * 8
        row += 8 if row % 16 == 0 else 0
        self.found = scratch("bloom rows", np.uint64, 64 * row).reshape(64, row)
        bloom_query(words, self.stride, hashes, seed, self.found)
        self.count = bloom_count(self.found, d, self.stride, seed)

    def support(self, policy: str, out: np.ndarray) -> None:
        """Write the support under the policy to out: uint32[count] for p0, uint32[r] with r <= count for the others."""
        if policy == "p0":
            return bloom_positions(self.found, self.d, self.stride, self.seed, out)
        n, r = self.count, out.size
        positives = scratch("bloom positives", np.uint32, n)
        bloom_positions(self.found, self.d, self.stride, self.seed, positives)
        first = {"naive": 0, "leftmost": 0, "middle": (n - r) // 2, "rightmost": n - r}.get(policy)
        if first is not None:
            out[:] = positives[first : first + r]
            return None
        scores = scratch("bloom scores", np.uint16, n)
        scores[:] = 0
        if policy == "p2":
            sizes = scratch("bloom conflict sets", np.uint8, 64 * self.words.size)
            sizes[:] = 0
            bloom_scores(positives, self.stride, self.hashes, self.seed, sizes, scores)
        return bloom_choose(positives, scores, self.seed, out)

"""The Bloom kernels against reference implementations, at the edges, inside their arrays; also run by test_cpus.py."""

import numpy as np
import pytest
from support import codec_conformance
from support.guards import survives
from support.reference_decoder import bloom as bloom_decoder

from grace_ext.index.bloom import MAX_HASHES, Bloom
from grace_ext.kernels import bloom as kernels


def run_through(d, indices, hashes, words, seed, fence=np.array):
    """All kernels in turn: (filter bytes, positives, scores, {r: chosen})."""
    stride, seed = -(-d // 64), np.uint32(seed)
    content = fence(np.zeros(words, np.uint64))
    kernels.bloom_insert(fence(np.array(indices, np.uint32)), stride, hashes, seed, content)
    found = fence(np.zeros(64 * ((stride + 63) // 64), np.uint64)).reshape(64, -1)
    kernels.bloom_query(content, stride, hashes, seed, found)
    count = kernels.bloom_count(found, d, stride, seed)
    positives, scores = fence(np.zeros(count, np.uint32)), fence(np.zeros(count, np.uint16))
    kernels.bloom_positions(found, d, stride, seed, positives)
    kernels.bloom_scores(positives, stride, hashes, seed, fence(np.zeros(64 * words, np.uint8)), scores)
    chosen = {}
    for r in {1, count // 3, count - 1, count} - {0}:
        chosen[r] = fence(np.zeros(r, np.uint32))
        kernels.bloom_choose(positives, scores, seed, chosen[r])
    return content.tobytes(), positives, scores, chosen


def some_filters():
    """(d, indices, hashes, words, seed) with few and many positives, d around the multiples of 64."""
    rng = np.random.default_rng(0)
    for d in (1, 2, 63, 64, 65, 127, 128, 129, 1000, 4032, 4095, 4096, 4097, 4161):
        for hashes in (1, 2, 7, MAX_HASHES):
            k = int(rng.integers(1, d + 1)) if hashes == 2 else 1 + d // 50
            indices = np.sort(rng.choice(d, k, replace=False))
            yield d, indices.tolist(), hashes, int(rng.integers(1, 2 + hashes * k // 40)), int(rng.integers(2**32))


@pytest.mark.parametrize("case", list(some_filters()), ids=lambda case: f"{case[0]}-{len(case[1])}-{case[2]}-{case[3]}")
def test_kernels_and_reference_implementations(case):
    d, indices, hashes, words, seed = case
    content, positives, scores, chosen = run_through(*case)
    assert content == bloom_decoder.filter_of(indices, d, hashes, seed, words)
    expected = bloom_decoder.positives_of(content, d, hashes, seed)
    found = [i for i, _ in expected]
    assert positives.tolist() == found and set(indices) <= set(found)
    assert scores.tolist() == bloom_decoder.scores_of(expected)
    for r, some in chosen.items():
        assert some.tolist() == bloom_decoder.choose(found, scores.tolist(), r, seed)


def test_large_conflict_sets():
    """All 20,000 positions are on 64 bits, about 600 on each: sizes stop at 255."""
    d = 20_000
    content, positives, scores, _ = run_through(d, range(d), 2, 1, 7)
    assert positives.size == d and (scores == 2 * (1024 // 255)).all()
    assert scores.tolist() == bloom_decoder.scores_of(bloom_decoder.positives_of(content, d, 2, 7))


def fenced(fence):
    good = True
    for case in some_filters():
        plain, inside = run_through(*case), run_through(*case, fence)
        good &= all(np.array_equal(a, b) for a, b in zip(plain[1:3], inside[1:3], strict=True))
    for junk in (1, 77, 255):  # filters as they may be received
        for d, k in ((1, 1), (64, 10), (4097, 4097)):
            payload = np.full(6 + 8, junk, np.uint8)
            for policy in range(7):
                payload[:2] = policy, 3
                codec_conformance.refused_or(
                    lambda received, out, d=d: Bloom.decode(received, d, out), fence(payload), fence(np.zeros(k, np.uint32))
                )
    return good


def test_bounds():
    run_through(*next(some_filters()))  # compiled before the child is started
    assert survives(fenced)

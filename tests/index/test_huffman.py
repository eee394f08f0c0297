"""huffman: code lengths, contexts, and the code over all bytes."""

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.position_inputs import HUGE, ascending
from support.reference_decoder import index as index_decoder
from support.reference_kernels import index as reference_index

from grace_ext import ConfigError, registry
from grace_ext.index.huffman import Huffman
from grace_ext.kernels.gap_huffman import plan_gap_codes


@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [0, 5],
        [1, 1],
        [1, 2, 4, 8],
        [1 << i for i in range(30)],
        [3] * 120,
        [10**8, *range(119)],
        [i * i for i in range(120)],
        *(np.random.default_rng(seed).integers(0, 1 + seed % 6, 20 + seed).tolist() for seed in range(1, 30)),  # with ties
        *((1 << np.random.default_rng(seed).integers(0, 11, 40)).tolist() for seed in range(5)),
    ],
)
def test_code_lengths(counts):
    """As the slow reference implementation's, in every context; the sizes add up."""
    rows = np.zeros((8, 128), np.int64)
    rows[:, : len(counts)] = counts
    rows[3] = 0  # a context that does not occur
    lengths = np.full((8, 128), 77, np.uint8)
    kept = rows.copy()
    plan_gap_codes(rows.reshape(-1), rows.sum(axis=0), lengths.reshape(-1))
    expected = reference_index.package_merge([*counts, *[0] * (128 - len(counts))], 10)
    assert np.array_equal(rows, kept)
    assert lengths[0].tolist() == expected
    if (lengths[1] != 77).any():  # a code for each context was shorter
        assert lengths[7].tolist() == expected and not lengths[3].any()


@pytest.mark.parametrize("d", [1, 2, 255, 256, 257, 300, 65535, 65536, 65537, 70_000, 2**24 + 5, HUGE])
def test_bytes_under_a_code_of_all_positions(d):
    """The closed form of the second decoder is the true count where one can count; then both must agree on the code."""
    if d <= 70_000:
        counts = np.bincount(np.arange(d, dtype="<u4").view(np.uint8), minlength=256)
        assert counts.tolist() == index_decoder.byte_counts(d)
    for k in {1, 2, 3, 4, 5, 7, min(d, 1000)} - set(range(d + 1, 9)):
        indices = np.unique(np.linspace(0, d - 1, k).astype(np.uint32))
        payload, _ = Huffman("bytes").encode(indices, d)
        assert payload.size == Huffman("bytes").size(indices, d)
        assert index_decoder.huffman(payload.tobytes(), d, indices.size) == indices.tolist()
        out = np.empty(indices.size, np.uint32)
        Huffman.decode(payload, d, out)
        assert np.array_equal(out, indices)


def test_bytes_that_are_not_ascending_are_refused():
    code = {
        symbol: bits
        for bits, symbol in index_decoder.canonical(index_decoder.package_merge(index_decoder.byte_counts(300), 12)).items()
    }
    for positions, good in (((1, 2, 299), True), ((1, 2, 2), False), ((2, 1, 3), False), ((1, 2, 300), False)):
        streams = [
            reference_kernels.to_bytes([bit for byte in position.to_bytes(4, "little") for bit in code[byte]])
            for position in positions
        ]
        head = bytes(1) + b"".join(len(stream).to_bytes(4, "little") for stream in streams)
        out = np.empty(3, np.uint32)
        section = np.frombuffer(head + b"".join(streams), np.uint8)
        assert codec_conformance.refused_or(lambda bytes_, into: Huffman.decode(bytes_, 300, into), section, out) == good


def test_huffman_refuses_another_scheme():
    with pytest.raises(ConfigError, match="allowed: gaps, bytes"):
        Huffman("words")


def test_huffman_uses_contexts_where_they_help():
    rng = np.random.default_rng(0)
    clustered = np.cumsum(1 + rng.geometric(2.0 ** -np.repeat(rng.integers(1, 12, 400), 50))).astype(np.uint32)
    first = {
        name: registry.lookup("index", "huffman")().encode(indices, HUGE)[0][0]
        for name, indices in (("clustered", clustered), ("random", ascending(10**7, 20_000)))
    }
    assert first == {"clustered": 8, "random": 1}

"""Levels and their entropy codes: kernels against reference implementations, payloads against the second decoder, hostile payloads."""

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.arrays import read_only
from support.guards import guarded
from support.reference_decoder import levels as levels_decoder
from support.reference_kernels import levels as reference_levels

from grace_ext import ConfigError, ContainerError
from grace_ext.kernels import _tables, ans, level_huffman
from grace_ext.kernels import levels as kernels
from grace_ext.value import _levels
from grace_ext.value._levels import ENTROPY, check_entropy, pack_levels, unpack_levels

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 200, 1001)
ALPHABETS = (1, 2, 3, 4, 15, 17, 100, 255, 256)


def draw(k, alphabet, width, seed=0):
    """uint8[k] below alphabet, normal around its middle."""
    levels = np.round(np.random.default_rng(seed).standard_normal(k) * width) + alphabet // 2
    return np.clip(levels, 0, alphabet - 1).astype(np.uint8)


def coded(mode, levels, alphabet):
    """The payload of that mode, even where another would be shorter."""
    out = np.empty(4 * levels.size + 2000, np.uint8)
    used = _levels._pack_coded(levels, alphabet, ENTROPY[mode], out.size, out)
    return np.concatenate([np.array([mode], np.uint8), out[:used]])


def unpacked(payload, alphabet, k, before=0xEE):
    out, intact = guarded(k)
    out[:] = before
    unpack_levels(read_only(payload), alphabet, out)
    assert intact()
    return out.copy()


@pytest.mark.parametrize("entropy", ENTROPY)
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_round_trip(alphabet, entropy):
    for k in SIZES:
        for width in (0, 0.1, 1, 5, 100):
            levels = draw(k, alphabet, width, k)
            payload = pack_levels(read_only(levels), alphabet, entropy)
            assert np.array_equal(unpacked(payload, alphabet, k), levels)
            assert payload.size <= 1 + -(-k * max(1, (alphabet - 1).bit_length()) // 8)
            assert levels_decoder.levels(payload.tobytes(), alphabet, k) == levels.tolist()


@pytest.mark.parametrize("mode", [_levels._HUFFMAN, _levels._ANS])
def test_codes_that_do_not_pay(mode):
    """Short and flat input, which pack_levels would send at a fixed width."""
    for k in SIZES[1:]:
        for alphabet in ALPHABETS[1:]:
            levels = draw(k, alphabet, 100, k)
            levels[0], levels[-1] = 0, alphabet - 1  # two levels at least
            payload = coded(mode, levels, alphabet)
            assert np.array_equal(unpacked(payload, alphabet, k), levels)
            assert levels_decoder.levels(payload.tobytes(), alphabet, k) == levels.tolist()


def test_the_choice_of_the_mode():
    skewed, flat = draw(5000, 100, 3), np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    assert [pack_levels(skewed, 100, entropy)[0] for entropy in ENTROPY] == [0, 1, 2]
    assert [pack_levels(flat, 256, entropy)[0] for entropy in ENTROPY] == [0, 0, 0]
    assert [pack_levels(np.full(5000, 7, np.uint8), 9, entropy)[0] for entropy in ENTROPY] == [0, 3, 3]


@pytest.mark.parametrize("width", [0.2, 1, 3, 10, 30])
def test_length_is_near_the_entropy(width):
    """ANS within 0.2 % and 0.012 bits; Huffman within Gallager's bound (1978), the largest probability and 0.086 bits."""
    levels = draw(200_000, 255, width)
    p = np.bincount(levels) / levels.size
    bound = -(p[p > 0] * np.log2(p[p > 0])).sum()
    bits = {entropy: 8 * pack_levels(levels, 255, entropy).size / levels.size for entropy in ENTROPY}
    assert bound <= bits["ans"] <= bound * 1.002 + 0.012
    assert bits["ans"] <= bits["huffman"] <= bound + p.max() + 0.09


@pytest.mark.parametrize("bits", range(1, 9))
def test_fixed_width(bits):
    for k in SIZES:
        levels = np.random.default_rng(k).integers(0, 1 << bits, k).astype(np.uint8)
        out, intact = guarded(k * bits // 8 + 8)
        kernels.pack_levels_fixed(levels, bits, out)
        size = -(-k * bits // 8)
        assert intact() and out[:size].tobytes() == reference_kernels.pack(levels, bits)
        again, intact = guarded(k)
        assert kernels.unpack_levels_fixed(out[:size].copy(), bits, again) == levels.max() and intact()
        assert np.array_equal(again, levels)


def test_counts():
    for k in (*SIZES, 5000):
        levels, counts = draw(k, 100, 9, k), np.full(100, 7, np.int64)
        _tables.count_levels(levels, counts)
        assert np.array_equal(counts, np.bincount(levels, minlength=100))


COUNTS = {
    "two": [1, 1],
    "skewed": [10**9, 1],
    "flat": [5] * 256,
    "one heavy in many": [1] * 255 + [10**6],
    "powers": [1 << i for i in range(31)],
    "fibonacci": [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597],
    "holes": [0, 3, 0, 0, 9, 1, 0],
    "largest": [2**31 - 3, 1, 1],
    "normal": np.bincount(draw(3000, 200, 20)).tolist(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_tables(name):
    counts = np.array(COUNTS[name], np.int64)
    n = counts.size
    classes, mantissas = np.empty((2, n), np.uint8)
    ans.ans_classes(counts, counts.sum(), classes, mantissas)
    assert (tuple(classes), tuple(mantissas)) == reference_levels.classes(COUNTS[name])
    shares = np.empty(n, np.int64)
    assert ans.ans_frequencies(classes, mantissas, shares)
    assert shares.tolist() == levels_decoder.frequencies(classes.tolist(), mantissas.tolist())
    assert ((shares > 0) == (counts > 0)).all() and shares.max() < 4096

    lengths = np.empty(n, np.uint8)
    level_huffman.huffman_lengths(counts, lengths)
    assert ((lengths > 0) == (counts > 0)).all() and lengths.max() <= 12
    assert sum(2.0 ** -int(length) for length in lengths if length) == 1
    best = reference_levels.huffman_cost(COUNTS[name])
    assert best <= (lengths * counts).sum() <= (best if name in ("two", "holes", "flat") else 1.02 * best)

    for parts, width, largest in (((classes, mantissas), 3, 13), ((lengths, np.zeros_like(lengths)), 0, 12)):
        out, intact = guarded(_tables.TABLE_ROOM)
        size = _tables.write_table(*parts, width, out)
        assert intact() and out[:size].tobytes() == reference_levels.table(*(part.tolist() for part in parts), width)
        again = np.full((2, n), 99, np.uint8)
        assert _tables.read_table(out[:size].copy(), width, largest, *again) == size
        assert np.array_equal(again, parts)
        assert _tables.read_table(out[: size - 1].copy(), width, largest, *again) == -1
        assert _tables.read_table(out[:size].copy(), width, int(parts[0].max()) - 1, *again) == -1


def test_the_longest_table_fits():
    zigzag = np.resize(np.array([13, 0], np.uint8), 256)
    out, intact = guarded(_tables.TABLE_ROOM)
    assert _tables.write_table(zigzag, np.full(256, 7, np.uint8), 3, out) > 0 and intact()


def test_division_by_reciprocal_is_exact():
    """The quotient of ans_encode at every frequency, for the states where the reciprocal is worst."""
    for f in range(1, 4096):
        reciprocal = -(-(1 << 44) // f)
        top = (f << 20) - 1
        for x in {top, top - f + 1, top - f, f * (top // f) - 1, 65536, 65536 // f * f - 1}:
            if 0 <= x <= top:
                assert x * reciprocal < 1 << 64 and x * reciprocal >> 44 == x // f


@pytest.mark.parametrize("seed", range(6))
def test_ans_stream(seed):
    rng = np.random.default_rng(seed)
    for k in SIZES:
        shares = np.bincount(np.minimum(rng.integers(0, 64, 4096) ** 2 // 40, 99), minlength=100).astype(np.int64)
        if seed == 0:
            shares = np.array([4095, 1], np.int64)
        levels = rng.choice(np.flatnonzero(shares), k).astype(np.uint8)
        words, intact = guarded(k + 17, np.uint16)
        start = ans.ans_encode(levels, shares, words)
        stream = words[start:].tobytes()
        assert intact() and stream == reference_levels.ans(levels.tolist(), shares.tolist())
        out, intact = guarded(k)
        assert ans.ans_decode(np.frombuffer(stream, np.uint8), shares, out) and intact()
        assert np.array_equal(out, levels)


@pytest.mark.parametrize("seed", range(4))
def test_huffman_stream(seed):
    for k in SIZES:
        levels = draw(k, 100, (0.3, 1, 10, 60)[seed], k)
        counts = np.bincount(levels, minlength=100).astype(np.int64) + (np.arange(100) < 2)
        lengths = np.empty(100, np.uint8)
        level_huffman.huffman_lengths(counts, lengths)
        out, intact = guarded(k * 12 // 8 + 16)
        size = level_huffman.huffman_encode(levels, level_huffman.level_codes(lengths), out)
        assert intact() and out[:size].tobytes() == reference_levels.huffman(levels.tolist(), lengths.tolist())


@pytest.mark.parametrize("mode", [None, _levels._HUFFMAN, _levels._ANS])
def test_any_payload_decodes_or_is_refused(mode):
    for k, alphabet in ((1, 2), (9, 3), (500, 5), (2000, 200)):
        levels = draw(k, alphabet, alphabet / 5)
        levels[0] = 0
        levels[-1] = 1
        payload = pack_levels(levels, alphabet, "none") if mode is None else coded(mode, levels, alphabet)
        for bad in codec_conformance.mutations(payload, seed=k, count=300):
            for size in {k, 1, k + 1}:
                try:
                    first = unpacked(bad, alphabet, size, 0)
                except ContainerError:
                    continue
                assert first.max() < alphabet and np.array_equal(first, unpacked(bad, alphabet, size, 0xEE))


def test_a_changed_stream_is_noticed():
    """The states must end where they began: 256 bits of check on all but the last refills."""
    payload = coded(_levels._ANS, draw(3000, 50, 6), 50)
    seen = 0
    for at in range(40, payload.size, 37):
        changed = payload.copy()
        changed[at] ^= 1
        with pytest.raises(ContainerError):
            unpacked(changed, 50, 3000)
        seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    "payload", [[], [4], [255, 1], [3], [3, 5], [3, 0, 0], [0], [0, 255], [0, 0, 0, 0], [1], [2], [2, 0], [1, 0]], ids=str
)
def test_malformed(payload):
    with pytest.raises(ContainerError, match="levels"):
        unpack_levels(np.array(payload, np.uint8), 5, np.empty(3, np.uint8))


def test_incomplete_and_overfull_codes_are_refused():
    data, out = np.zeros(64, np.uint8), np.empty(4, np.uint8)
    ends = np.array([16, 32, 48, 64], np.int64)
    for lengths in ([1, 2], [1, 1, 1], [12] * 256, [0, 0], [1], [0] * 256):
        assert not level_huffman.huffman_decode(data, ends, np.array(lengths, np.uint8), out)
    for table in (([0, 0], [0, 0]), ([0, 13], [0, 7]), ([1, 1], [0, 0])):
        assert not ans.ans_frequencies(*np.array(table, np.uint8), np.empty(2, np.int64))


def test_unknown_entropy():
    with pytest.raises(ConfigError, match="x: entropy=zip; allowed: none, huffman, ans"):
        check_entropy("x", "zip")
    assert check_entropy("x", "ans") == "ans"

"""Classes of blocks of levels: kernels against reference implementations, what they save, hostile payloads."""

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import read_only
from support.guards import guarded
from support.reference_decoder import levels as levels_decoder
from support.reference_kernels import levels as reference_levels

from grace_ext import ContainerError
from grace_ext.kernels import level_blocks as kernels
from grace_ext.value import _levels
from grace_ext.value._levels import pack_levels, unpack_levels


def draw(k, alphabet, scales, seed=0):
    """uint8[k] below alphabet, around its middle; the blocks of 64 take their scales in turn."""
    scale = np.repeat(np.resize(np.float64(scales), -(-k // 64)), 64)[:k]
    levels = np.round(np.random.default_rng(seed).standard_normal(k) * scale) + (alphabet - 1) // 2
    return np.clip(levels, 0, alphabet - 1).astype(np.uint8)


INPUTS = {
    "one": (draw(1, 5, [1]), 5),
    "a block": (draw(64, 9, [2]), 9),
    "and one": (draw(65, 9, [2, 0]), 9),
    "two scales": (draw(5000, 100, [1, 12]), 100),
    "one scale": (draw(5000, 100, [6]), 100),
    "many": (draw(20_000, 256, np.exp2(np.arange(0, 7, 0.2))), 256),
    "constant blocks": (draw(6000, 7, [0, 0, 3, 0]), 7),
    "two levels": (np.repeat(np.arange(80, dtype=np.uint8) & 1, 64), 2),
    "constant": (np.full(200, 3, np.uint8), 4),
    "at the ends": (np.repeat(np.resize(np.uint8([0, 255, 127]), 70), 64), 256),
    "one level": (np.zeros(99, np.uint8), 1),
}
MIXED = draw(5000, 100, [1, 12, 3])


@pytest.mark.parametrize("name", INPUTS)
def test_choice(name):
    levels, alphabet = INPUTS[name]
    count = -(-levels.size // 64)
    numbers, intact = guarded(count)
    sizes, sizes_intact = guarded(kernels.MOST_CLASSES, np.int64)
    saved = kernels.choose_classes(read_only(levels), alphabet, numbers, sizes)
    assert intact() and sizes_intact()
    parts = reference_levels.parts(levels.tolist(), numbers.tolist())
    assert sizes.tolist() == [len(part) for part in parts] + [0] * (kernels.MOST_CLASSES - len(parts))
    assert all(parts)

    # The wider a block, the higher its class, and blocks of one fine class stay together.
    fine = [reference_levels.fine_class(levels[64 * b : 64 * b + 64].tolist(), alphabet) for b in range(count)]
    pairs = sorted(set(zip(fine, numbers.tolist(), strict=True)))
    assert len({f for f, _ in pairs}) == len(pairs) and [c for _, c in pairs] == sorted(c for _, c in pairs)

    def cost(classes):
        found = reference_levels.parts(levels.tolist(), classes)
        return sum(reference_levels.stream_cost(part, alphabet) for part in found) + reference_levels.entropy(
            [classes.count(c) for c in set(classes)]
        )

    chosen, slack = cost(numbers.tolist()), 1 + 2e-4 * levels.size
    assert saved == pytest.approx(reference_levels.stream_cost(levels.tolist(), alphabet) - chosen - 320, abs=slack)
    for c in range(len(parts) - 1):  # no two neighbours should be one
        assert chosen <= cost([n - (n > c) for n in numbers.tolist()]) + slack


@pytest.mark.parametrize("k", [1, 63, 64, 65, 127, 128, 129, 640, 1001])
def test_split_and_merge(k):
    levels = np.random.default_rng(k).integers(0, 256, k).astype(np.uint8)
    count = -(-k // 64)
    for classes in {1, min(2, count), min(8, count)}:
        numbers = np.random.default_rng(k).permutation(np.resize(np.arange(classes, dtype=np.uint8), count))
        sizes, intact = guarded(classes, np.int64)
        assert kernels.class_sizes(read_only(numbers), k, sizes) and intact()
        parts = reference_levels.parts(levels.tolist(), numbers.tolist())
        assert sizes.tolist() == [len(part) for part in parts]
        split, intact = guarded(k)
        kernels.split_blocks(read_only(levels), numbers, sizes, split)
        assert intact() and split.tolist() == sum(parts, [])
        out, intact = guarded(k)
        kernels.merge_blocks(read_only(split.copy()), numbers, sizes, out)
        assert intact() and np.array_equal(out, levels)
        assert not kernels.class_sizes(numbers, k, np.empty(classes + 1, np.int64)), "a class is empty"


@pytest.mark.parametrize("entropy", ["ans", "huffman"])
@pytest.mark.parametrize("name", INPUTS)
def test_round_trip(name, entropy, monkeypatch):
    monkeypatch.setattr(_levels, "_WORTH_CLASSES", 0)
    levels, alphabet = INPUTS[name]
    payload, out = _levels._pack(read_only(levels), alphabet, entropy, 0), np.empty_like(levels)
    assert (payload[0] == 4) == (name in ("two scales", "many", "constant blocks", "at the ends", "two levels"))
    assert payload.size <= _levels._pack_stream(levels, alphabet, entropy).size
    unpack_levels(read_only(payload), alphabet, out)
    assert np.array_equal(out, levels)
    assert levels_decoder.levels(payload.tobytes(), alphabet, levels.size) == levels.tolist()


def test_nearly_all_that_the_scales_are_worth_is_saved():
    """Two scales, by turns at random: one stream for both against the mean of their own entropies."""
    rng = np.random.default_rng(3)
    levels = draw(100_000, 200, rng.choice([2.0, 16.0], 1563))
    one_by_one = [8 * pack_levels(draw(100_000, 200, [scale]), 200, "ans").size / 1e5 for scale in (2.0, 16.0)]
    bits = 8 * pack_levels(levels, 200, "ans").size / 1e5
    assert bits < np.mean(one_by_one) + 1 / 64 + 0.02 < 8 * _levels._pack_stream(levels, 200, "ans").size / 1e5 - 0.3


def test_never_longer_than_one_stream():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        levels = draw(4096 + seed, 256, 2 ** (rng.standard_normal(64) * seed / 20 + 3), seed)
        for entropy in ("ans", "huffman"):
            assert pack_levels(levels, 256, entropy).size <= _levels._pack_stream(levels, 256, entropy).size
    assert pack_levels(MIXED, 100, "none")[0] == 0 and pack_levels(MIXED[:4000], 100, "ans")[0] == 2


@pytest.mark.parametrize("entropy", ["ans", "huffman"])
def test_any_payload_decodes_or_is_refused(entropy):
    payload = pack_levels(MIXED, 100, entropy)
    assert payload[0] == 4
    for bad in codec_conformance.mutations(payload, count=1500):
        for size in (MIXED.size, MIXED.size + 1, MIXED.size - 64, 1):
            found = codec_conformance.decoded_or_refused(lambda data, out: unpack_levels(data, 100, out), bad, size)
            assert found is None or found.max() < 100


def forged(classes, *payloads, lengths=None):
    lengths = [len(payload) for payload in payloads[:-1]] if lengths is None else lengths
    body = np.array(lengths, "<u4").tobytes() + b"".join(bytes(payload) for payload in payloads)
    return np.frombuffer(bytes([4, classes]) + body, np.uint8)


NUMBERS = [0, 0b101]  # classes 1, 0, 1 at a bit each
GOOD = forged(2, NUMBERS, [3, 4], [3, 2])


def test_a_forged_payload():
    out = np.empty(130, np.uint8)
    unpack_levels(GOOD, 5, out)
    assert out.tolist() == [2] * 64 + [4] * 64 + [2] * 2 == levels_decoder.levels(GOOD.tobytes(), 5, 130)


@pytest.mark.parametrize(
    "payload, message",
    [
        (GOOD[:1], "number of classes"),
        (forged(1, NUMBERS, [3, 4]), "number of classes"),
        (forged(9, *[[3, 0]] * 10), "number of classes"),
        (GOOD[:9], "number of classes"),
        (forged(2, NUMBERS, [3, 4], [3, 2], lengths=[2, 2**32 - 1]), "do not hold"),
        (GOOD[:-3], "do not hold"),
        (forged(2, [0, 0b111], [3, 4], [3, 2]), "no blocks"),
        (forged(2, [3, 1], [3, 4], [3, 2]), "no blocks"),
        (forged(3, [0, 0b110100], [3, 1], [3, 2], [3, 3]), "out of range"),
        (forged(2, NUMBERS, GOOD, [3, 2]), "not known"),
        (forged(2, GOOD, [3, 4], [3, 2]), "not known"),
        (forged(2, NUMBERS, [3, 5], [3, 2]), "out of range"),
        (GOOD[:-2], "not known"),
        (np.r_[GOOD, GOOD[:1]], "constant"),
    ],
)
def test_malformed(payload, message):
    with pytest.raises(ContainerError, match=message):
        unpack_levels(payload, 5, np.empty(130, np.uint8))

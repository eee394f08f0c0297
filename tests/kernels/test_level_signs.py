"""Levels told by the sign of the level before: kernels against plain loops, what they save, hostile payloads."""

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import read_only
from support.guards import guarded
from support.reference_decoder import levels as levels_decoder
from support.reference_kernels import levels as reference_levels

from grace_ext import ContainerError
from grace_ext.kernels import level_signs as kernels
from grace_ext.value import _levels
from grace_ext.value._levels import pack_levels, unpack_levels

SIZES = (1, 2, 3, 63, 64, 65, 128, 500, 1001)
ALPHABETS = (1, 2, 3, 4, 7, 8, 255, 256)


def persistent(k, alphabet, same, seed=0, zeros=0.1):
    """uint8[k] below alphabet, around its middle; a level has the sign of the one before with probability `same`."""
    rng, middle = np.random.default_rng(seed), (alphabet - 1) // 2
    signs = np.cumprod(np.where(rng.random(k) < same, 1, -1))
    widths = np.minimum(rng.geometric(0.4, k), middle) * (rng.random(k) >= zeros)
    levels = middle + signs * widths
    return np.where(rng.random(k) < 0.02, alphabet - 1, levels).astype(np.uint8)


@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("k", SIZES)
def test_mirror(k, alphabet):
    for levels in (
        persistent(k, alphabet, 0.9, k),
        np.random.default_rng(k).integers(0, alphabet, k).astype(np.uint8),
        np.zeros(k, np.uint8),
    ):
        middle = (alphabet - 1) // 2
        out, intact = guarded(k)
        kernels.mirror_levels(read_only(levels), middle, out)
        assert intact() and out.tolist() == reference_levels.mirrored(levels.tolist(), middle)
        kernels.unmirror_levels(out, middle)
        assert intact() and np.array_equal(out, levels)


@pytest.mark.parametrize("same", [0.1, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_bits_saved(alphabet, same):
    for k in SIZES:
        levels = persistent(k, alphabet, same, k)
        saved = reference_levels.saved_by_mirroring(levels.tolist(), (alphabet - 1) // 2)
        assert kernels.signs_saved(read_only(levels), (alphabet - 1) // 2) == pytest.approx(saved, abs=1e-3 * k)


@pytest.mark.parametrize("entropy", ["ans", "huffman"])
@pytest.mark.parametrize("alphabet", [3, 8, 100, 256])
def test_round_trip(alphabet, entropy):
    for k in (65, 500, 5000):
        for same in (0.02, 0.5, 0.9, 1.0):
            levels = persistent(k, alphabet, same, k)
            payload, out = pack_levels(read_only(levels), alphabet, entropy), np.empty_like(levels)
            unpack_levels(read_only(payload), alphabet, out)
            assert np.array_equal(out, levels)
            assert payload.size <= 1 + -(-k * (alphabet - 1).bit_length() // 8)
            assert levels_decoder.levels(payload.tobytes(), alphabet, k) == levels.tolist()
            if k == 5000:
                assert (payload[0] == 5) == (same in (0.02, 0.9)), "all of one sign need no other's"


def test_what_is_known_of_the_signs_is_saved():
    """Signs that repeat with probability 0.9 cost 0.469 bits; the magnitudes, what they cost without the signs."""
    levels = persistent(200_000, 255, 0.9, zeros=0)
    levels = levels[levels < 254]
    magnitudes = np.abs(levels - 127.0).astype(np.uint8)
    bits = 8 * (pack_levels(levels, 255, "ans").size - pack_levels(magnitudes, 128, "ans").size) / levels.size
    same = ((levels[1:] > 127) == (levels[:-1] > 127)).mean()
    assert bits == pytest.approx(-same * np.log2(same) - (1 - same) * np.log2(1 - same), abs=0.01)


def test_signs_of_no_pattern_are_sent_as_they_are(monkeypatch):
    for seed in range(200):
        levels = persistent(100 + 20 * seed, 100, 0.5, seed)
        payload = pack_levels(levels, 100, "ans")
        assert payload[0] != 5
    monkeypatch.setattr(_levels, "_WORTH_MIRRORING", (64, np.inf))
    assert pack_levels(persistent(5000, 100, 0.99), 100, "ans")[0] != 5
    assert pack_levels(persistent(5000, 100, 0.99), 100, "none")[0] == 0


def test_any_payload_decodes_or_is_refused():
    levels = persistent(5000, 100, 0.9)
    payload = pack_levels(levels, 100, "ans")
    assert payload[0] == 5
    for bad in codec_conformance.mutations(payload, count=500):
        found = codec_conformance.decoded_or_refused(lambda data, out: unpack_levels(data, 100, out), bad, levels.size)
        assert found is None or found.max() < 100


def test_a_forged_payload():
    """At a fixed width, which the encoder never mirrors: 0 turns 0 into 4, and 5 has no other side."""
    payload, out = np.uint8([5, 0, 0b101_000_000 & 0xFF, 0b1]), np.empty(3, np.uint8)
    unpack_levels(payload, 6, out)
    assert out.tolist() == [0, 4, 5] == levels_decoder.levels(payload.tobytes(), 6, 3)


@pytest.mark.parametrize("payload", [[5], [5, 5, 3, 1], [5, 6], [5, 3], [5, 3, 6], [5, 0, 1]], ids=str)
def test_malformed(payload):
    with pytest.raises(ContainerError, match="levels"):
        unpack_levels(np.array(payload, np.uint8), 6, np.empty(3, np.uint8))

"""The Bloom filter as a codec: sizes, rates, policies, error feedback, and what it refuses."""

import math
import random

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import FLT_MAX, gauss, same_bits
from support.reference_decoder import bloom as bloom_decoder
from support.reference_kernels import bloom as reference_bloom

import grace_ext
from grace_ext import ConfigError, ContainerError
from grace_ext._util.rng import Stream
from grace_ext.index.bloom import MAX_HASHES, POLICIES, Bloom, filter_size
from grace_ext.pipeline.container import parse

EXACT = [policy for policy in POLICIES if policy != "naive"]


def uniform(d, k, seed=0):
    return np.sort(np.random.default_rng(seed).choice(d, k, replace=False)).astype(np.uint32)


def rows(d, k, seed=0):
    """Runs of 512 positions, as in the gradient of an embedding."""
    first = 512 * uniform(d // 512, k // 512, seed)
    return (first[:, None] + np.arange(512, dtype=np.uint32)).reshape(-1)


def columns(d, k, seed=0):
    """The same few of every 4608 positions, as in a convolution with few active channels."""
    return np.flatnonzero(np.arange(d) % 4608 < 4608 * k // d).astype(np.uint32)


def parameters(payload):
    """(hashes, seed, filter bytes)"""
    return int(payload[1]), int.from_bytes(payload[2:6].tobytes(), "little"), payload[6:].tobytes()


@pytest.mark.parametrize("fpr", [0.9, 0.6, 0.1, 0.01, 0.001, 1e-4, 1e-6])
def test_sizes_are_those_of_remark_2(fpr):
    r = 1_000_000
    hashes, words = filter_size(r, fpr)
    wanted = -math.log2(fpr)
    assert hashes == min(MAX_HASHES, max(1, round(wanted)))
    assert (1 - math.exp(-hashes * r / (64 * words))) ** hashes == pytest.approx(fpr, rel=1e-3)  # Lemma 3
    if 1 <= wanted <= MAX_HASHES:
        assert 64 * words == pytest.approx(-r * math.log(fpr) / math.log(2) ** 2, rel=0.01)
    payload, _ = Bloom("p0", fpr).encode(uniform(4000, 400), 4000)
    assert payload.size == 6 + 8 * filter_size(400, fpr)[1] == Bloom("p2", fpr).size(uniform(4000, 400), 4000)
    assert payload.size <= 4 * 400, "raw would be sent"


@pytest.mark.parametrize("positions", [uniform, rows, columns])
@pytest.mark.parametrize("fpr", [0.1, 0.01, 0.001])
def test_false_positive_rate(fpr, positions):
    """Within 10 % of the target. At 0.001 about 1,000 are expected in each of three, so 10 % are 5 standard deviations."""
    d, false, others = 1_000_003, 0, 0
    for seed in range(3):
        indices = positions(d, d // 100, seed)
        support = Bloom("p0", fpr, seed).encode(indices, d)[1]
        assert np.isin(indices, support).all()
        false, others = false + support.size - indices.size, others + d - indices.size
    assert false / others == pytest.approx(fpr, rel=0.1)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy):
    """What each takes of the positives; p0's support are all of them."""
    indices, d = uniform(30_000, 300), 30_000
    r = indices.size
    payload, support = Bloom(policy, 0.01, 5).encode(indices, d)
    every = Bloom("p0", 0.01, 5).encode(indices, d)[1]
    assert every.size > 1.5 * r and np.isin(support, every).all()
    first = {"naive": 0, "leftmost": 0, "middle": (every.size - r) // 2, "rightmost": every.size - r}.get(policy)
    if policy == "p0":
        assert payload[0] == 0
    elif first is None:
        assert support.size == r and support[0] < every[30] and support[-1] > every[-30]
    else:
        assert np.array_equal(support, every[first : first + r])
    assert support.tolist() == bloom_decoder.bloom(payload.tobytes(), d, support.size)


def test_p2_keeps_more_true_positives_than_p1_and_than_algorithm_1():
    d, k = 60_000, 600
    share = {"p1": [], "p2": [], "algorithm 1": []}
    for seed in range(3):
        indices = uniform(d, k, seed)
        for policy in ("p1", "p2"):
            payload, support = Bloom(policy, 0.01, seed).encode(indices, d)
            share[policy].append(np.isin(support, indices).mean())
        hashes, key, content = parameters(payload)
        chosen = reference_bloom.algorithm_1(bloom_decoder.positives_of(content, d, hashes, key), k, random.Random(seed))
        share["algorithm 1"].append(np.isin(list(chosen), indices).mean())
    p1, p2, algorithm_1 = (np.mean(share[name]) for name in ("p1", "p2", "algorithm 1"))
    assert 0.45 < p1 < 0.55
    assert p2 > algorithm_1 > 1.25 * p1
    assert p2 > 1.6 * p1


@pytest.mark.parametrize("policy", ["p1", "p2"])
def test_a_random_choice_is_that_of_the_payload(policy):
    """Not of a generator of the user's; and another one for another support, so that no position loses for ever."""
    indices, d = uniform(30_000, 300), 30_000
    np.random.seed(1)
    state = np.random.get_state()[1].copy()
    payload, support = Bloom(policy, 0.01).encode(indices, d)
    assert np.array_equal(np.random.get_state()[1], state)
    for seed in (2, 3):
        np.random.seed(seed)
        assert same_bits(Bloom(policy, 0.01).encode(indices, d)[0], payload)
    lost = np.setdiff1d(indices, support)
    for other in range(1, 30):
        moved = np.union1d(indices, [(indices[-1] + other) % d]).astype(np.uint32)
        lost = np.setdiff1d(lost, Bloom(policy, 0.01).encode(moved, d)[1])
    assert not lost.size
    assert not np.array_equal(Bloom(policy, 0.01, seed=1).encode(indices, d)[1], support)


@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("value", ["raw", "qsgd"])
def test_true_values_and_the_residual(policy, value):
    """False positives that are sent leave the residual, true ones that are not stay, and so does all the rest."""
    c = grace_ext.compressor(f"topk:0.01/bloom:{policy}:fpr=0.01/{value}")
    gradient, residual = gauss(30_000), np.float32(0.1) * gauss(30_000, 1)
    total, pending = gradient + residual, np.empty_like(gradient)
    encoded = c.encode_compensated(gradient, residual, pending, Stream())
    dense = grace_ext.decompress(encoded.blob, gradient.size)
    selected = c.sparsifier.select(total, codec_conformance.scope_of(total))[0]
    false, missed = np.setdiff1d(encoded.support, selected), np.setdiff1d(selected, encoded.support)
    assert false.size > 20 and missed.size > (-1 if policy == "p0" else 20)
    rest = np.setdiff1d(np.arange(gradient.size), encoded.support)
    assert same_bits(pending[rest], total[rest]) and not dense[rest].any()
    assert same_bits(encoded.values, total[encoded.support])
    assert same_bits(pending, total - dense)
    if value == "raw":
        assert not pending[false].any() and same_bits(dense[encoded.support], total[encoded.support])


def test_naive_shifts_values():
    """Appendix B.1: the values of the selected positions go in their order to the first positives."""
    c = grace_ext.compressor("topk:0.01/bloom:naive:fpr=0.01/raw")
    gradient, pending = gauss(30_000), np.empty(30_000, np.float32)
    encoded = c.encode_compensated(gradient, np.zeros_like(gradient), pending, Stream())
    dense = grace_ext.decompress(encoded.blob, gradient.size)
    selected = c.sparsifier.select(gradient, codec_conformance.scope_of(gradient))[0]
    assert encoded.support.size == selected.size and not np.array_equal(encoded.support, selected)
    assert same_bits(encoded.decoded, gradient[selected])
    assert same_bits(dense[encoded.support], gradient[selected])
    assert same_bits(encoded.values, gradient[encoded.support])
    assert same_bits(pending, gradient - dense)
    cosine = dense[selected] @ gradient[selected] / np.linalg.norm(dense) / np.linalg.norm(gradient[selected])
    assert abs(cosine) < 0.3, "noise: that is why it is for study only"


def test_naive_does_not_shift_what_would_overflow():
    """The error of a shifted value can be the sum of two: Inf in a residual would stay there for ever."""
    c = grace_ext.compressor("topk:0.01/bloom:naive:fpr=0.01/raw")
    for largest, sent_as in ((2.0**125, Bloom.id), (2.0**126, 1), (FLT_MAX, 1)):
        gradient = np.clip(gauss(30_000), -2, 2) * np.float32(largest / 2)
        pending = np.empty_like(gradient)
        encoded = c.encode_compensated(gradient, np.zeros_like(gradient), pending, Stream())
        assert parse(encoded.blob).index_id == sent_as and np.isfinite(pending).all()
        assert same_bits(pending, gradient - grace_ext.decompress(encoded.blob, gradient.size))


def test_auto_takes_none_of_it():
    gradient = gauss(30_000)
    assert not any(Bloom(policy).lossless for policy in POLICIES)
    assert [policy for policy in POLICIES if Bloom(policy).remaps_values] == ["naive"]
    assert parse(grace_ext.compressor("topk:0.01/auto/raw").compress(gradient)).index_id != Bloom.id


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rest", ["fpr=0.02/raw", "fpr=0.3/qsgd:4"])
def test_policies_keep_the_contract(policy, rest):
    c = grace_ext.compressor(f"topk:0.1/bloom:{policy}:{rest}", seed=3)
    for gradient in codec_conformance.gradients().values():
        codec_conformance.check_compressor(c, gradient)
        codec_conformance.check_feedback(c, [gradient, gradient[::-1].copy(), np.float32(0.5) * gradient])


def test_tiny_tensors_go_raw():
    """Rule 3 of the format: a filter that is longer than the positions themselves is not sent."""
    for policy in POLICIES:
        c = grace_ext.compressor(f"topk:0.01/bloom:{policy}/raw")
        gradient = gauss(300)
        blob = c.compress(gradient)
        assert parse(blob).index_id == 1
        assert np.array_equal(np.flatnonzero(grace_ext.decompress(blob, 300)), np.sort(np.argsort(-abs(gradient))[:3]))


def valid(k=40, d=2000):
    return Bloom("p1", 0.01).encode(uniform(d, k), d)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[:5], "missing"),
        (lambda p: p[:6], "missing"),
        (lambda p: p[:-1], "missing"),
        (lambda p: np.append(p, np.uint8(0)), "missing"),
        (lambda p: np.concatenate([[7], p[1:]]), "no known kind"),
        (lambda p: np.concatenate([p[:1], [0], p[2:]]), "0 hash functions"),
        (lambda p: np.concatenate([p[:1], [17], p[2:]]), "17 hash functions"),
        (lambda p: np.concatenate([p[:6], np.full(224, 255)]), "more than raw"),
        (lambda p: np.concatenate([p[:6], np.zeros(p.size - 6)]), "0 positives cannot give 40"),
        (lambda p: np.concatenate([[0], p[1:]]), r"\d+ positives cannot give 40 positions under p0"),
    ],
    ids=lambda change: change if isinstance(change, str) else "",
)
def test_malformed_payloads(change, message):
    out = np.zeros(40, np.uint32)
    Bloom.decode(valid(), 2000, out)
    with pytest.raises(ContainerError, match=message):
        Bloom.decode(change(valid()).astype(np.uint8), 2000, out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "p3"}, "allowed: p0, p1, p2, leftmost"),
        ({"fpr": 0.0}, "1e-06 to 0.9"),
        ({"fpr": 0.95}, "16 hash"),
        ({"fpr": math.nan}, "fpr=nan"),
        ({"seed": -1}, "0 to 2"),
        ({"seed": 2**32}, "0 to 2"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        Bloom(**options)


def test_specs():
    assert str(grace_ext.compressor("topk:0.01/bloom:p2:fpr=0.01:seed=3/raw").index) == "bloom:p2:fpr=0.01:seed=3"
    assert str(Bloom()) == "bloom" and Bloom().policy == "p0"

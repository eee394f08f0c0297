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
from grace_ext.policy.projections import contraction

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


# The appendix's worked examples and lemmas


def test_the_example_of_figure_10():
    """Three positions, three hash functions: a true positive, a true negative, and a false positive whose bits others have set.

    The figure's filter has 12 bits. Remark 2 wants as few for a rate of 1/8, and a filter has whole words of 64.
    """
    d, inserted = 4000, np.array([700, 1900, 3100], np.uint32)
    assert filter_size(3, 1 / 8) == (3, 1)
    payload, support = Bloom("p0", 1 / 8).encode(inserted, d)
    hashes, seed, content = parameters(payload)
    assert (hashes, len(content)) == (3, 8)
    set_bits = {bit for y in inserted.tolist() for bit in bloom_decoder.bits_of(y, d, hashes, seed, 1)}
    assert int.from_bytes(content, "little") == sum(1 << bit for bit in set_bits) and 3 < len(set_bits) <= 9
    hit = [set(bloom_decoder.bits_of(y, d, hashes, seed, 1)) <= set_bits for y in range(d)]
    assert np.isin(inserted, support).all(), "true positives"
    assert np.array_equal(np.flatnonzero(hit), support), "all others are true negatives"
    assert 3 < support.size < 100, "false positives: (9 / 64)**3 of 4,000 are 11"


def test_the_example_of_figure_11():
    """Five selected elements, four of which are rebuilt: position 4 is a false positive, from which on values are shifted.

    Of 128 elements, because the 64 positions of a group never collide with each other.
    """
    selected = np.array([1, 3, 6, 9, 12], np.uint32)
    filters = (Bloom("naive", 0.5, seed) for seed in range(5000))
    codec = next(one for one in filters if one.encode(selected, 128)[1].tolist() == [1, 3, 4, 6, 9])
    gradient = np.zeros(128, np.float32)
    gradient[selected] = 5, -4, 3, -2, 1
    blob = grace_ext.compressor(f"topk:0.04/{codec}/raw").compress(gradient)
    assert parse(blob).index_id == Bloom.id and parse(blob).k == 5
    dense = grace_ext.decompress(blob, 128)
    assert dense[[1, 3]].tolist() == [5, -4], "what precedes the false positive stays in its place"
    assert dense[[4, 6, 9]].tolist() == [3, -2, 1], "what follows goes to the next positive"
    assert dense[12] == 0 and np.count_nonzero(dense) == 5


def squared(values):
    return float(np.sum(values.astype(np.float64) ** 2))


def left_out(spec, gradient, seeds=1):
    """(‖g - C(g)‖² / ‖g‖², |support| / d), each the mean over as many draws and filters."""
    errors, shares = [], []
    for seed in range(seeds):
        encoded = grace_ext.compressor(spec, seed=seed).encode(gradient, Stream(seed))
        dense = grace_ext.decompress(encoded.blob, gradient.size)
        assert parse(encoded.blob).index_id == Bloom.id
        errors.append(squared(gradient - dense) / squared(gradient))
        shares.append(encoded.support.size / gradient.size)
    return np.mean(errors), np.mean(shares)


@pytest.mark.parametrize("fpr", [0.1, 0.01])
def test_the_error_of_p0_is_within_lemma_7(fpr):
    """At most (1 - β) ‖g‖², where β = |P| / d is above r / d. All magnitudes equal, it is reached; random-r reaches it on average."""
    top, random_, d = f"topk:0.1/bloom:p0:fpr={fpr}/raw", f"randomk:0.1/bloom:p0:fpr={fpr}/raw", 40_000
    for gradient in (gauss(d), np.random.default_rng(0).standard_t(3, d).astype(np.float32)):
        error, beta = left_out(top, gradient)
        assert error <= 1 - beta and beta > 0.1 + 0.5 * fpr
    error, beta = left_out(top, np.sign(gauss(d)))
    assert error == pytest.approx(1 - beta, abs=1e-6)
    error, beta = left_out(random_, gauss(d), seeds=10)
    assert error == pytest.approx(1 - beta, abs=0.005)  # 7 standard deviations of the mean


def test_p0_loses_nothing_of_a_sparse_gradient():
    """Lemma 7 (ii): β = δ = 1. False positives carry zeros."""
    gradient = np.zeros(30_000, np.float32)
    gradient[uniform(30_000, 300)] = gauss(300)
    blob = grace_ext.compressor("nonzero/bloom:p0:fpr=0.01/raw").compress(gradient)
    assert parse(blob).index_id == Bloom.id and parse(blob).k > 500
    assert np.array_equal(grace_ext.decompress(blob, gradient.size), gradient)


def test_top_r_and_random_r_with_p0_are_in_the_order_of_remark_3():
    """Random-r ≥ random-r with the filter; random-r ≥ top-r ≥ top-r with the filter."""
    gradient, rest = gauss(40_000), "bloom:p0:fpr=0.05/raw"
    exact = {name: contraction(f"{name}:0.1/rice/raw", gradient) for name in ("topk", "randomk")}
    filtered = {name: left_out(f"{name}:0.1/{rest}", gradient, seeds=5) for name in ("topk", "randomk")}
    assert filtered["topk"][0] < exact["topk"] < filtered["randomk"][0] < exact["randomk"] == pytest.approx(0.9, abs=0.02)
    for name, (error, beta) in filtered.items():
        assert beta == pytest.approx(0.1 + 0.05 * 0.9, abs=0.005), name
        assert error <= 1 - beta + 0.005, name


TAKES_R = ["leftmost", "middle", "rightmost", "p1"]


@pytest.mark.parametrize("policy", TAKES_R)
def test_a_sparse_gradient_loses_what_lemma_8_and_equation_10_say(policy):
    """‖g - C(g)‖² = (1 - |I1| / r) ‖g‖² on average over the places of the values, I1 being the true positives that are kept."""
    d, r, errors, bounds = 50_000, 500, [], []
    for seed in range(40):
        gradient, indices = np.zeros(d, np.float32), uniform(d, r, seed)
        gradient[indices] = gauss(r, seed)
        support = Bloom(policy, 0.02, seed).encode(indices, d)[1]
        blob = grace_ext.compressor(f"nonzero/bloom:{policy}:fpr=0.02:seed={seed}/raw").compress(gradient)
        errors.append(squared(gradient - grace_ext.decompress(blob, d)) / squared(gradient))
        bounds.append(1 - np.isin(indices, support).mean())
    assert 0.5 < np.mean(bounds) < 0.8, "about a third of 1,500 positives is true"
    assert np.mean(errors) == pytest.approx(np.mean(bounds), abs=0.02)  # 5 standard deviations


@pytest.mark.parametrize("policy", TAKES_R)
def test_the_error_of_policies_that_take_r_is_within_lemma_8_and_equation_9(policy):
    """(1 - r / d) ‖g‖²: random-r reaches it on average, top-r stays below, and above what it loses without a filter."""
    gradient, rest = gauss(40_000), f"bloom:{policy}:fpr=0.2/raw"
    error, share = left_out(f"randomk:0.1/{rest}", gradient, seeds=20)
    assert share == pytest.approx(0.1) and error == pytest.approx(0.9, abs=0.005)
    error, share = left_out(f"topk:0.1/{rest}", gradient)
    assert share == pytest.approx(0.1) and contraction("topk:0.1/rice/raw", gradient) + 0.1 < error < 0.9


def test_the_errors_of_p1_are_those_of_lemma_9():
    """E1 = (1 - k1 / r) ‖g_P‖², E2 = (1 - k2 / (m0 - r)) ‖g_P‖², and the total is at most E1 + E2.

    The lemma draws I1 from r elements and I2 from the other m0 - r, yet sums over all m0. Its first formula is that of
    gradients with zeros at the false positives, its second that of gradients with zeros at the true ones. For all gradients,
    k1 / r stands at the norm of the true positives, and k2 / (m0 - r) at that of the false ones.
    """
    d, r = 50_000, 500
    sums = {name: np.zeros(2) for name in ("I1", "I2", "only true", "only false")}
    for seed in range(40):
        indices, gradient = uniform(d, r, seed), gauss(d, seed).astype(np.float64)
        positives = Bloom("p0", 0.02, seed).encode(indices, d)[1]
        support = Bloom("p1", 0.02, seed).encode(indices, d)[1]
        true = np.isin(positives, indices)
        kept, on_p = np.isin(positives, support), gradient[positives]
        k1, k2, m0 = (kept & true).sum(), (kept & ~true).sum(), positives.size
        assert k1 + k2 == r
        e1, e2 = squared(on_p[~(kept & true)]), squared(on_p[~(kept & ~true)])
        assert squared(on_p[~kept]) <= e1 + e2
        sums["I1"] += e1, squared(on_p) - k1 / r * squared(on_p[true])
        sums["I2"] += e2, squared(on_p) - k2 / (m0 - r) * squared(on_p[~true])
        sums["only true"] += squared(on_p[true & ~kept]), (1 - k1 / r) * squared(on_p[true])
        sums["only false"] += squared(on_p[~true & ~kept]), (1 - k2 / (m0 - r)) * squared(on_p[~true])
    for name, (measured, formula) in sums.items():
        assert measured == pytest.approx(formula, rel=0.02), name

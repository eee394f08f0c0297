"""What each sparsifier selects, beyond the contract; random positions without an index section."""

import math

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.arrays import gauss, read_only, same_bits
from support.reference_kernels import sparse as reference_sparse

import grace_ext
from grace_ext import ConfigError, ContainerError
from grace_ext._util.rng import Stream
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.index.shared import Shared
from grace_ext.memory.none import NoMemory
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.spec import parse_stage
from grace_ext.sparsifiers import Scope


def select(text, dense, stream=None, sizes=None):
    scope = Scope(stream or Stream(), sizes or (dense.size,))
    indices, values = parse_stage("sparsifier", text).select(dense, scope)
    assert same_bits(values, dense[indices])
    return indices.copy()


def heavy(d, seed=0):
    return np.random.default_rng(seed).standard_t(2, d).astype(np.float32)


@pytest.mark.parametrize(
    "text, message",
    [
        ("topk:0.1:per=layer", "allowed: bucket, tensor, chunk"),
        ("threshold:0", "above 0"),
        ("threshold:-1", "above 0"),
        ("threshold:1e-60", "above 0"),
        ("threshold:inf", "finite"),
        ("threshold:nan", "finite"),
        ("threshold:1e39", "finite"),
        ("dgc:0", "density=0.0; allowed"),
        ("dgc:1.5", "density=1.5; allowed"),
        ("dgc:sample=0", "sample=0.0; allowed"),
        ("dgc:sample=2", "sample=2.0; allowed"),
        ("randomk:0", "density=0.0; allowed"),
        ("randomk:nan", "density=nan; allowed"),
        ("randomk:unbiased=maybe", "not a bool"),
        ("topk:0.1:per=chunk/raw", "needs a transform before it"),
        ("topk:0.1/shared", "'topk'"),
        ("dense/shared/raw", "'dense'"),
    ],
)
def test_what_is_not_allowed(text, message):
    with pytest.raises(ConfigError, match=message):
        grace_ext.compressor(text)


def test_threshold_includes_its_value():
    dense = np.array([0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0)), 3, -0.1, 0], np.float32)
    assert select("threshold:0.5", dense).tolist() == [0, 1, 3]
    assert select("threshold:1e-45", dense).tolist() == [0, 1, 2, 3, 4]
    assert select("threshold:4", dense).size == 0


def test_nonzero_loses_nothing():
    dense = np.array([0, -0.0, 1e-45, 0, -3, 0, np.finfo(np.float32).max], np.float32)
    assert select("nonzero", dense).tolist() == [2, 4, 6]
    assert np.array_equal(grace_ext.decompress(grace_ext.compressor("nonzero").compress(dense), 7), dense)


@pytest.mark.parametrize("sizes", [(5000,), (1, 4999), (0, 16, 0, 1000, 17, 3967), (1250,) * 4])
def test_topk_per_tensor_is_topk_of_each_tensor(sizes):
    dense = gauss(5000) * np.repeat(np.float32(10) ** np.arange(len(sizes), dtype=np.float32), sizes)
    dense[:20] = 0
    starts = np.cumsum((0, *sizes[:-1]))
    expected = [
        start + reference_kernels.topk(dense[start : start + size], min(size, max(1, round(0.02 * size))))
        for start, size in zip(starts, sizes, strict=True)
    ]
    found = select("topk:0.02:per=tensor", dense, sizes=sizes)
    codec_conformance.check_support(found, 5000)
    assert np.array_equal(found, np.concatenate(expected))

    residual, out = gauss(5000, 2), np.empty_like(dense)
    stage, scope = parse_stage("sparsifier", "topk:0.02:per=tensor"), Scope(Stream(), sizes)
    plain = [part.copy() for part in stage.select(dense + residual, scope)]
    fused = stage.select_compensated(dense, residual, out, scope)
    assert all(map(same_bits, plain, fused)) and same_bits(out, dense + residual)


def test_the_bucket_tells_its_sizes():
    tensors = [Tensor("a", 100, 2), Tensor("b", 300, 2)]
    bucket = Bucket(
        "b",
        tensors,
        grace_ext.compressor("topk:0.01:per=tensor/raw/raw"),
        parse_stage("communicator", "allgather"),
        NoMemory(),
    )
    transport = grace_ext.communicators.InProcessGroup(1).transport(0)
    out = np.empty(400, np.float32)
    pending = bucket.start(transport, lambda into: np.copyto(into, np.arange(1, 401, dtype=np.float32)), Stream())
    assert bucket.finish(pending, transport, out, 1.0)
    assert np.flatnonzero(out).tolist() == [99, 397, 398, 399]


# DGC


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_dgc_selects_about_k(density):
    """The threshold's rank in the sample is at least 400, so a fifth of k is 4 sigma: 6e-5 for each of 30 tries."""
    d = 1_000_000
    for seed in range(10):
        found = select(f"dgc:{density}", heavy(d, seed), Stream(seed))
        assert 0.8 * density * d <= found.size <= 1.2 * density * d
    k = found.size
    assert np.array_equal(found, reference_kernels.topk(heavy(d, seed), k)), "not the largest of all"


def test_dgc_is_exact_where_the_sample_is_everything():
    dense = heavy(20_000)
    assert np.array_equal(select("dgc:0.01", dense), reference_kernels.topk(dense, 200))
    assert np.array_equal(select("dgc:0.01:sample=1", dense), reference_kernels.topk(dense, 200))


def test_dgc_takes_the_largest_where_too_many_pass():
    """Ties and zeros: no quantile of them lets about k pass."""
    dense = np.random.default_rng(0).choice(np.array([0, 1, 2], np.float32), 100_000, p=[0.9, 0.099, 0.001])
    found = select("dgc:0.01", dense)
    assert np.array_equal(found, reference_kernels.topk(dense, 1000))
    dense = np.zeros(100_000, np.float32)
    assert select("dgc:0.01", dense).size == 0
    dense[5000:7000] = heavy(2000)
    assert (
        np.array_equal(select("dgc:0.001", dense), reference_kernels.topk(dense, 100))
        or select("dgc:0.001", dense).size <= 120
    )


def test_dgc_samples_by_the_stream():
    dense = heavy(1_000_000)
    sizes = {select("dgc:0.01", dense, Stream(step=step, rank=rank)).size for step in (0, 1) for rank in (0, 1)}
    assert len(sizes) > 1


@pytest.mark.parametrize("text", ["dgc:0.01", "randomk:0.001", "threshold:100", "nonzero"])
def test_one_bad_value_far_from_the_sample(text):
    for bad in (np.nan, np.inf, -np.inf):
        for at in (0, 123_457, 299_999):
            dense = gauss(300_000)
            dense[at] = bad
            assert parse(grace_ext.compressor(text).compress(dense)).non_finite
            memory = grace_ext.memory("residual")
            state, room = memory.begin("w", dense.size)
            assert grace_ext.compressor(text).encode_compensated(dense, state, room, Stream()).non_finite


# Random positions


def test_randomk_draws_the_same_on_all_ranks():
    dense, k = gauss(5000), 50
    key = {"seed": 3, "name": "w", "step": 8}
    expected = reference_sparse.draw_positions(k, 5000, *Stream(**key).shared().key())
    for rank in range(4):
        assert select("randomk:0.01", dense, Stream(**key, rank=rank)).tolist() == expected
    for other in ({"seed": 4}, {"name": "v"}, {"step": 9}):
        assert select("randomk:0.01", dense, Stream(**{**key, **other})).tolist() != expected


@pytest.mark.parametrize("text", ["randomk:0.1", "randomk:0.1/shared", "randomk:0.1/auto/qsgd"])
def test_no_index_section_is_sent(text):
    dense = gauss(100_000)
    blob = grace_ext.compressor(text, 5).compress(dense, name="w", step=2, rank=1)
    parsed = parse(blob)
    assert parsed.index_id == Shared.id and parsed.k == 10_000 and parsed.index_section.size == 8
    assert np.array_equal(parsed.index_section.view("<u4"), Stream(5, "w", 2).shared().key())


def test_an_index_codec_that_is_asked_for_is_used():
    dense = gauss(100_000)
    blobs = {name: grace_ext.compressor(f"randomk:0.1/{name}/raw").compress(dense) for name in ("rice", "raw", "shared")}
    assert [parse(blob).index_id for blob in blobs.values()] == [3, 1, Shared.id]
    arrays = [grace_ext.decompress(blob, dense.size) for blob in blobs.values()]
    assert same_bits(arrays[0], arrays[1]) and same_bits(arrays[0], arrays[2])


def test_any_key_decodes_and_nothing_else():
    rng = np.random.default_rng(0)
    for d, k in ((1, 1), (2, 1), (4097, 4096), (2**31 - 1, 100), (200_000, 2000)):
        for payload in (np.zeros(8, np.uint8), np.full(8, 255, np.uint8), rng.integers(0, 256, 8).astype(np.uint8)):
            out = np.full(k, 0xFFFFFFFF, np.uint32)
            Shared.decode(read_only(payload), d, out)
            codec_conformance.check_support(out, d)
            assert out.tolist() == reference_sparse.draw_positions(k, d, *payload.view("<u4").tolist())
    for size in (0, 7, 9, 16):
        with pytest.raises(ContainerError, match="8 bytes"):
            Shared.decode(np.zeros(size, np.uint8), 10, np.empty(3, np.uint32))


@pytest.fixture(scope="module")
def draws():
    """(gradient of 300, density, decoded gradients of 4,000 steps, as float64)."""
    dense, c = gauss(300, 5), grace_ext.compressor("randomk:0.15:unbiased=true", seed=1)
    decoded = [grace_ext.decompress(c.compress(dense, name="w", step=step), 300) for step in range(4000)]
    return dense.astype(np.float64), 45 / 300, np.array(decoded, np.float64)


def test_every_position_is_sent_equally_often(draws):
    """Bernstein: a count is this far off with probability 1e-9 / d. And all together, chi-square within 6 sigma (2e-9)."""
    _, p, decoded = draws
    steps, d = decoded.shape
    assert ((decoded != 0).sum(1) == p * d).all()
    off = (decoded != 0).sum(0) - p * steps
    variance, log = steps * p * (1 - p), math.log(2 * d / 1e-9)
    assert abs(off).max() <= log / 3 + math.sqrt(log**2 / 9 + 2 * variance * log)
    assert abs((off**2).sum() / variance / d - 1) <= 6 * math.sqrt(2 / d)


def test_randomk_is_unbiased(draws):
    """The values are exactly d / k times the gradient's, so with the counts above the mean is right; and for a projection,
    Bernstein's bound on the mean of independent steps: off by more with probability 1e-9 for each of 20."""
    dense, p, decoded = draws
    np.testing.assert_allclose(decoded[decoded != 0], np.broadcast_to(dense / p, decoded.shape)[decoded != 0], rtol=1e-6)
    for seed in range(20):
        along = gauss(300, seed).astype(np.float64)
        errors = decoded @ along - dense @ along
        largest = np.abs(dense * along).sum() / p
        bound = math.sqrt(2 * errors.var() * math.log(2e9) / len(errors)) + largest * math.log(2e9) / (3 * len(errors))
        assert abs(errors.mean()) <= bound


def test_randomk_has_the_variance_of_random_choice(draws):
    """E |C(x) - x|^2 = (d / k - 1) |x|^2: Stich et al. for independent choice; the sum here is off by 5 % only beyond
    6 sigma."""
    dense, p, decoded = draws
    found = ((decoded - dense) ** 2).sum(1)
    assert 6 * found.std() / math.sqrt(len(found)) < 0.05 * found.mean()
    assert abs(found.mean() / ((1 / p - 1) * (dense @ dense)) - 1) < 0.05


def test_unbiased_values_stay_finite_and_the_residual_is_what_is_missing():
    dense = gauss(1000)
    dense[:500] = np.finfo(np.float32).max
    c = grace_ext.compressor("randomk:0.1:unbiased=true/shared/fp16")
    assert not c.lossless and np.isfinite(grace_ext.decompress(c.compress(dense), 1000)).all()
    pending = np.empty_like(dense)
    encoded = c.encode_compensated(dense[500:].copy(), np.zeros(500, np.float32), pending[:500], Stream())
    assert same_bits(pending[:500], dense[500:] - grace_ext.decompress(encoded.blob, 500))


def test_error_feedback_on_top_of_unbiased_values_is_refused():
    def bucket(memory, text):
        allgather = parse_stage("communicator", "allgather")
        return Bucket("b", [Tensor("a", 10, 2)], grace_ext.compressor(text), allgather, memory)

    with pytest.raises(ConfigError, match="memory 'none'"):
        bucket(grace_ext.memory("residual"), "randomk:0.1:unbiased=true")
    bucket(grace_ext.memory("none"), "randomk:0.1:unbiased=true")
    bucket(grace_ext.memory("residual"), "randomk:0.1")


# Per chunk


@pytest.mark.parametrize(
    "values",
    [
        gauss(10_000),
        np.round(gauss(9999)),
        np.zeros(500, np.float32),
        np.full(77, -3.0, np.float32),
        np.empty(0, np.float32),
    ],
)
@pytest.mark.parametrize(("chunk", "density"), [(64, 0.05), (4096, 0.01), (16, 1.0), (1000, 0.999), (2, 0.001)])
def test_per_chunk(values, chunk, density):
    """As many of every chunk, zeros too: a value codec's chunks stay those of the transform."""
    sparsifier = parse_stage("sparsifier", f"topk:{density}:per=chunk")
    k = sparsifier.count(chunk)
    indices, found = sparsifier.select(values, Scope(Stream(), (values.size,), chunk))
    expected = []
    for start in range(0, values.size, chunk):
        order = np.argsort(-np.abs(values[start : start + chunk]), kind="stable")[:k]
        expected += sorted(start + order)
    assert np.array_equal(indices, expected) and same_bits(found, values[indices])


def test_per_chunk_sees_a_nan():
    values = gauss(1000)
    values[700] = np.nan
    sparsifier = parse_stage("sparsifier", "topk:0.001:per=chunk")
    assert np.isnan(sparsifier.select(values, Scope(Stream(), (1000,), 100))[1]).sum() == 1

"""Top-k against ranking all magnitudes."""

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.arrays import gauss, same_bits
from support.selection import select

from grace_ext import registry
from grace_ext._util.rng import Stream
from grace_ext.pipeline.spec import parse_stage
from grace_ext.sparsifiers import Scope


@pytest.mark.parametrize("density", [1e-9, 0.001, 0.01, 0.3, 1.0])
def test_topk_is_the_true_top_k(density):
    sparsifier = registry.build("sparsifier", "topk", {"density": density})
    for gradient in [*codec_conformance.gradients().values(), gauss(300_000)]:
        k = min(gradient.size, max(1, round(density * gradient.size)))
        assert np.array_equal(
            sparsifier.select(gradient, codec_conformance.scope_of(gradient))[0], reference_kernels.topk(gradient, k)
        )


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

"""Top-k against ranking all magnitudes."""

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.arrays import gauss, same_bits
from support.selection import select

from grace_ext import ConfigError, registry
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


@pytest.mark.parametrize("sizes", [(5000,), (1, 4999), (0, 16, 0, 1000, 17, 3967)])
@pytest.mark.parametrize(("block", "density"), [(64, 0.05), (4096, 0.015625), (2, 0.5), (1000, 0.001)])
def test_per_block_is_the_largest_of_each_block_of_a_tensor_without_zeros(sizes, block, density):
    dense, residual, out = gauss(5000), gauss(5000, 2), np.empty(5000, np.float32)
    dense[1000:1100] = residual[1000:1100] = 0
    expected, start = [], 0
    for size in sizes:
        for first in range(start, start + size, block):
            last = min(first + block, start + size)
            k = max(1, round(density * (last - first)))
            expected.append(first + reference_kernels.topk((dense + residual)[first:last], k))
        start += size
    stage, scope = parse_stage("sparsifier", f"topk:{density}:per={block}"), Scope(Stream(), sizes)
    assert str(stage) == f"topk:{density}:per={block}" and not stage.takes_parts
    plain = [part.copy() for part in stage.select(dense + residual, scope)]
    fused = stage.select_compensated(dense, residual, out, scope)
    assert all(map(same_bits, plain, fused)) and same_bits(out, dense + residual)
    assert np.array_equal(plain[0], np.concatenate(expected)) and same_bits(plain[1], (dense + residual)[plain[0]])


@pytest.mark.parametrize("per", ["1", "-4096", "4096.0", "16777217", "layer"])
def test_what_the_share_cannot_be_taken_of(per):
    with pytest.raises(ConfigError, match="allowed: bucket, tensor, chunk, or a number from 2 to 16777216"):
        parse_stage("sparsifier", f"topk:0.01:per={per}")


def test_per_chunk_sees_a_nan():
    values = gauss(1000)
    values[700] = np.nan
    sparsifier = parse_stage("sparsifier", "topk:0.001:per=chunk")
    assert np.isnan(sparsifier.select(values, Scope(Stream(), (1000,), 100))[1]).sum() == 1

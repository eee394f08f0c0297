"""Selecting a transform's coefficients in one pass, or after all are there: the same containers and residuals."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits

import grace_ext
from grace_ext._util.rng import Stream
from grace_ext.transforms.dct import DCT


def encoded(spec, *, gradient, residual):
    pending = np.full_like(gradient, np.nan)
    found = grace_ext.compressor(spec).encode_compensated(gradient, residual, pending, Stream())
    assert "transform" in found.seconds or found.non_finite
    return found.blob.copy(), pending, grace_ext.compressor(spec).compress(gradient).copy()


@pytest.mark.parametrize("d", [1, 63, 4096, 20_000])
@pytest.mark.parametrize(
    "spec", ["panthalia", "dct:16:dims=1/topk:0.1:per=chunk/rice/raw", "dct:8/topk:0.2:per=chunk/keys/polyfit"]
)
def test_both_ways_give_the_same(spec, d, monkeypatch):
    given = {"gradient": gauss(d, 1), "residual": gauss(d, 2)}
    in_one_pass = encoded(spec, **given)
    monkeypatch.setattr(DCT, "largest_of_chunks", None)
    monkeypatch.setattr(DCT, "selects", False)
    assert all(same_bits(a, b) for a, b in zip(in_one_pass, encoded(spec, **given), strict=True))


def test_a_lossy_index_codec_gets_all_coefficients(monkeypatch):
    monkeypatch.setattr(DCT, "largest_of_chunks", None)
    encoded("dct:8/topk:0.1:per=chunk/bloom/raw", gradient=gauss(1000), residual=gauss(1000, 1))


@pytest.mark.parametrize("spec", ["panthalia", "dct/topk:0.01/rice/raw"])
def test_gradients_that_are_not_finite(spec):
    gradient = gauss(5000)
    gradient[4999] = np.inf
    blob, _, alone = encoded(spec, gradient=gradient, residual=gauss(5000, 1))
    for container in (blob, alone):
        assert np.isnan(grace_ext.decompress(container, 5000)).any()

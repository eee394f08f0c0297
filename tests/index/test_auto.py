"""auto: about the shortest codec, found from sizes alone."""

import math

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss
from support.position_inputs import FIXED, ascending, fits, inputs
from support.reference_kernels import index as reference_index

import grace_ext
from grace_ext import registry
from grace_ext.index._gaps import GapCounts
from grace_ext.index.auto import shortest


def fixed(d):
    return [registry.lookup("index", name)() for name in FIXED if fits(name, d)]


@pytest.mark.parametrize("name", inputs())
def test_statistics_and_bounds(name):
    """What auto goes by: the size from the statistics is the size, and no bound is above it."""
    indices, d = inputs()[name]
    gaps = GapCounts(indices, d)
    assert gaps.counts.reshape(8, -1).tolist() == reference_index.class_counts(indices)
    for codec in fixed(d):
        size = codec.encode(indices, d)[0].size
        assert codec.size_from_gaps(gaps) == codec.size(indices, d) == size >= codec.size_lower_bound(gaps), codec.name


@pytest.mark.parametrize("name", [*inputs(), *codec_conformance.supports()])
def test_auto_takes_about_the_shortest_without_encoding(name, monkeypatch):
    indices, d = {**inputs(), **codec_conformance.supports()}[name]
    sizes = {codec.name: codec.encode(indices, d)[0].size for codec in fixed(d)}
    for text in FIXED:
        monkeypatch.setattr(registry.lookup("index", text), "encode", None)
    chosen = shortest(indices, d)  # a codec of other codecs' sections knows its size by encoding them
    assert sizes[chosen.name] <= min(sizes.values()) * 1.005
    assert sizes[chosen.name] == min(sizes.values()) or min(sizes, key=sizes.get) == "huffman"


def test_auto_leaves_huffman_where_it_saves_next_to_nothing():
    """At random positions Rice is as short within half a percent, and three times as fast; where they cluster it is not."""
    names = [
        registry.lookup("index", "auto")().choose(indices, d).name
        for indices, d in ((ascending(10**6, 100_000), 10**6), inputs()["scales that vary"])
    ]
    assert names == ["rice", "huffman"]


def test_bounds_spare_the_sizes_of_codecs_that_cannot_win(monkeypatch):
    indices = ascending(10**6, 10_000)
    monkeypatch.setattr(registry.lookup("index", "rle"), "size", None)
    assert registry.lookup("index", "auto")().choose(indices, 10**6).name in ("rice", "huffman")


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1, 0.3, 0.5])
def test_auto_is_within_2_percent_of_the_bound_on_random_positions(density):
    d = 4_000_000
    indices = ascending(d, round(density * d))
    k = indices.size
    bound = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
    assert 8 * registry.lookup("index", "auto")().encode(indices, d)[0].size <= 1.02 * bound


def test_auto_on_clustered_positions():
    """Far below the bound for random positions, which real gradients are not."""
    for name, share in (
        ("rows of an embedding", 0.04),
        ("rows with holes", 0.4),
        ("blocks of channels", 0.2),
        ("two densities", 0.9),
        ("scales that vary", 0.75),
    ):
        indices, d = inputs()[name]
        k = indices.size
        bound = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
        assert 8 * registry.lookup("index", "auto")().encode(indices, d)[0].size <= share * bound, name


def test_the_choice_is_shown():
    rows = np.zeros(96 * 2000, np.float32)
    rows[inputs()["rows of an embedding"][0]] = 1
    cases = (
        (rows, "topk:1.0", "rle"),
        (gauss(20_000), "topk:0.01/bitmap", "raw"),
        (gauss(20_000), "topk:0.1/elias_fano", "elias_fano"),
        (gauss(100), "dense", None),
        (np.full(100, np.nan, np.float32), "topk", None),
    )
    for gradient, spec_, expected in cases:
        assert grace_ext.compressor(spec_).encode(gradient, codec_conformance.STREAM).index_codec == expected

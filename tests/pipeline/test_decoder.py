"""Decoding: sums, rows, and what an error leaves behind."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits

import grace_ext
from grace_ext import ConfigError, ContainerError
from grace_ext.pipeline import container
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.decoder import add_all, decode_add, decode_rows, decode_sum, decompress, reorder, sum_at

D = 600


def blob(spec="topk:0.1/rice/raw", seed=0, d=D):
    return grace_ext.compressor(spec).compress(gauss(d, seed))


def test_reorder_puts_each_value_in_its_place():
    values = np.array([10, 20, 30], np.float32)
    assert reorder(values, np.array([2, 0, 1], np.uint32)) is values and values.tolist() == [20, 30, 10]
    assert reorder(values, None).tolist() == [20, 30, 10]


@pytest.mark.parametrize("spec", ["topk:0.1/rice/raw", "topk:0.1/rice/polyfit", "dense/raw", "dct/topk:0.1/rice/raw"])
def test_adding_with_a_weight_is_adding_what_is_decoded(spec):
    data, start = blob(spec), gauss(D, 9)
    accumulator = start.copy()
    decode_add(data, accumulator, -0.5)
    assert np.allclose(accumulator, start - np.float32(0.5) * decompress(data, D), rtol=0, atol=1e-6)


def damaged(data):
    """With another value codec, which does not exist, and a checksum that is right."""
    body = data[: data.size - len(container.checksum(data))].copy()
    body[4] = 200
    return np.append(body, np.frombuffer(container.checksum(body), np.uint8))


def test_an_error_leaves_the_accumulator_as_it_was():
    accumulator = gauss(D, 1)
    for wrong in (damaged(blob()), blob()[:-1], blob(d=D + 1)):
        with pytest.raises(ContainerError):
            decode_add(wrong, accumulator)
        assert same_bits(accumulator, gauss(D, 1))


@pytest.mark.parametrize(
    "specs",
    [
        ["topk:0.1/rice/raw"] * 3,
        ["topk:0.1/rice/raw", "dense/raw", "nonzero/raw"],
        ["dct/topk:0.1/rice/raw"] * 2,
        ["dct/topk:0.1/rice/raw", "topk:0.1/rice/raw"],
        [],
    ],
)
def test_a_weighted_sum_of_containers_of_all_kinds(specs):
    blobs = [blob(spec, seed) for seed, spec in enumerate(specs)]
    expected = sum((decompress(data, D).astype(np.float64) for data in blobs), np.zeros(D)) / 4
    out = np.full(D, np.nan, np.float32)
    decode_sum([parse(data) for data in blobs], out, 0.25)
    assert np.allclose(out, expected, rtol=0, atol=1e-5)
    start = gauss(D, 5)
    add_all([parse(data) for data in blobs], start)
    assert np.allclose(start, gauss(D, 5) + 4 * expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["topk:0.1/rice/qsgd:7", "topk:0.1/bitmap/lloyd", "topk:0.01/raw/raw"])
def test_the_elements_of_a_sum_are_those_of_the_dense_one(spec):
    parsed = [parse(blob(spec, seed)) for seed in range(3)]
    out = np.empty(D, np.float32)
    decode_sum(parsed, out, 0.25)
    at, values = sum_at(parsed, D, 0.25)
    assert (np.diff(at.astype(int)) > 0).all() and set(np.flatnonzero(out)) <= set(at.tolist())
    assert same_bits(values, out[at])


@pytest.mark.parametrize("spec", ["dense/raw", "dct/topk:0.1/rice/raw", None])
def test_only_sparse_containers_have_elements(spec):
    other = container.pack_non_finite(D) if spec is None else blob(spec)
    with pytest.raises(ContainerError, match="dense, not finite or has a transform"):
        sum_at([parse(blob()), parse(other)], D, 1.0)


def test_elements_of_nothing_and_of_another_size():
    at, values = sum_at([], D, 1.0)
    assert at.size == values.size == 0
    with pytest.raises(ContainerError, match="601\\] elements, 600 were expected"):
        sum_at([parse(blob()), parse(blob(d=D + 1))], D, 1.0)


def test_one_non_finite_container_makes_the_sum_non_finite_everywhere():
    out = np.zeros(D, np.float32)
    decode_sum([parse(blob()), parse(container.pack_non_finite(D))], out)
    assert np.isnan(out).all() and np.isnan(decompress(container.pack_non_finite(D), D)).all()


def test_containers_of_another_size_are_refused_before_anything_is_written():
    out = gauss(D)
    with pytest.raises(ContainerError, match="601 elements, 600 were expected"):
        decode_sum([parse(blob()), parse(blob(d=D + 1))], out)
    assert same_bits(out, gauss(D))


@pytest.mark.parametrize("wrong", [np.zeros(D), np.zeros((D, 1), np.float32), np.zeros(2 * D, np.float32)[::2], [0.0] * D])
def test_accumulators_that_cannot_be_written_to(wrong):
    for run in (lambda: decode_add(blob(), wrong), lambda: decode_sum([parse(blob())], wrong), lambda: add_all([], wrong)):
        with pytest.raises(ConfigError, match="writable, contiguous float32"):
            run()


@pytest.mark.parametrize("weight", [None, "1", np.nan, np.inf, 1e300, np.array([0.5])], ids=repr)
def test_a_weight_is_a_finite_number(weight):
    for spec in ("topk:0.1/rice/raw", "dense/raw"):
        out = gauss(D)
        with pytest.raises(ConfigError, match="weight=.*; allowed: numbers that are finite in float32"):
            decode_add(blob(spec), out, weight)
        assert same_bits(out, gauss(D))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rows_are_those_of_the_dense_sum(ranks):
    width, blobs = 6, [blob("topk:0.01/rice/raw", seed) for seed in range(ranks)]
    rows, sums = decode_rows([parse(data) for data in blobs], width, 0.5)
    dense = np.empty(D, np.float32)
    decode_sum([parse(data) for data in blobs], dense, 0.5)
    touched = np.flatnonzero(dense.reshape(-1, width).any(1))
    assert rows.dtype == np.int64 and np.array_equal(rows, touched)
    assert np.allclose(sums, dense.reshape(-1, width)[touched], rtol=0, atol=1e-6)


def test_rows_of_nothing_and_of_what_is_not_finite():
    rows, sums = decode_rows([], 6)
    assert rows.size == 0 and sums.shape == (0, 6)
    rows, sums = decode_rows([parse(container.pack_non_finite(D))], 6)
    assert rows.tolist() == [0] and np.isnan(sums).all()
    for spec in ("dense/raw", "dct/topk:0.1/rice/raw"):
        with pytest.raises(ContainerError, match="neither dense nor transformed"):
            decode_rows([parse(blob(spec))], 6)

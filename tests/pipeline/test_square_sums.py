"""Sums of squares of what is decoded."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits

import grace_ext
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.decoder import decode_sum
from grace_ext.pipeline.square_sums import SquareSums

MATRICES = np.array([(30, 10), (1, 200), (0, 0), (100, 1)])
D = 600


@pytest.mark.parametrize(
    "spec, written", [("topk:0.1/rice/raw", True), ("dense/raw", False), ("dct/topk:0.1/rice/raw", False)]
)
def test_they_are_those_of_the_sum_however_it_is_decoded(spec, written):
    blobs = [parse(grace_ext.compressor(spec).compress(gauss(D, seed))) for seed in range(3)]
    out, plain, squares = np.empty(D, np.float32), np.empty(D, np.float32), SquareSums(MATRICES)
    decode_sum(blobs, out, 0.5, squares)
    decode_sum(blobs, plain, 0.5)
    assert same_bits(out, plain) and squares.written == written
    start, expected = 0, []
    for rows, columns in MATRICES:
        square = np.square(out[start : start + rows * columns].astype(float)).reshape(rows, columns)
        start += rows * columns
        expected += [square.sum(axis=1), square.sum(axis=0)]
    np.testing.assert_allclose(squares.of(out), np.concatenate(expected), rtol=1e-5)

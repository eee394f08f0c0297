"""Gradients in parts, and sketches that are computed while they are read."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits

from grace_ext.kernels.second_moment import random_sketch
from grace_ext.sparsifiers.parts import SketchedParts
from grace_ext.sparsifiers.topk import select_largest_of_parts

SIZES = (5000, 0, 1, 300, 9000)
KEY = np.uint32(3), np.uint32(77)


def sketches_of(parts):
    found = np.full((len(parts), 8), np.nan, np.float32)
    for part, sketch in zip(parts, found, strict=True):
        random_sketch(part, *KEY, sketch)
    return found.reshape(-1)


def test_a_sketch_that_nobody_has_written_is_written_when_it_is_wanted():
    parts = SketchedParts([gauss(size, size) for size in SIZES], *KEY)
    expected = sketches_of(parts)
    assert not parts.written and same_bits(parts.complete(), expected) and parts.written
    parts[0][:] = 0
    assert same_bits(parts.complete(), expected)


@pytest.mark.parametrize("in_out", [False, True], ids=["apart", "in the array that is written to"])
@pytest.mark.parametrize("values", ["normal", "steep"])  # where the sample misleads, and there is no room for candidates
def test_a_selection_writes_them_while_it_reads(values, in_out):
    d = sum(SIZES) if values == "normal" else 400_000
    sizes = SIZES if values == "normal" else (200_000, 100_000, 100_000)
    residual, out, gradient = gauss(d, 1), np.empty(d, np.float32), gauss(d, 2)
    if values == "steep":  # zeros in all lines but few, so that every other element is above the bound
        gradient, residual = np.zeros(d, np.float32), np.zeros(d, np.float32)
        gradient[::2] = 1
    ends = np.cumsum(sizes)[:-1]
    if in_out:
        out[:] = gradient
    apart, given = np.split(gradient, ends), np.split(out if in_out else gradient, ends)
    parts, expected = SketchedParts(given, *KEY), sketches_of(apart)
    plain = [found.copy() for found in select_largest_of_parts(apart, residual, np.empty(d, np.float32), 50)]
    found = select_largest_of_parts(parts, residual, out, 50)
    assert all(same_bits(a, b) for a, b in zip(found, plain, strict=True))
    assert same_bits(out, gradient + residual)
    assert parts.written and same_bits(parts.complete(), expected)

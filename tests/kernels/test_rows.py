"""The kernels of rows against numpy, and inside their arrays."""

import numpy as np
import pytest
from support import codec_conformance
from support.guards import survives
from support.reference_kernels import index as reference_index

from grace_ext.kernels.rows import add_compact, add_rows, join_rows, split_rows, whole_rows


@pytest.mark.parametrize("width", [1, 7, 64, 2**31 - 1])
def test_kernels(width):
    for indices, d in codec_conformance.supports().values():
        rows, compact = reference_index.split_rows(indices, width)
        found, places = np.empty(indices.size, np.uint32), indices.copy()
        count = split_rows(places, width, found, places)
        assert (found[:count].tolist(), places.tolist()) == (rows, compact)
        assert join_rows(found[:count], places, width, places) and np.array_equal(places, indices)
        whole = [x for row in rows for x in range(row * width, min(d, (row + 1) * width))]
        out = np.empty(len(whole), np.uint32)
        whole_rows(found[:count], width, out)
        assert out.tolist() == whole


def check_adding(fence):
    """Positions of one rank into the rows of all: whole rows, parts of rows, a last one that is short."""
    width, rows, own = 5, np.array([1, 4, 6, 7, 9], np.uint32), np.array([1, 6, 7, 9], np.uint32)
    compact = np.array([*range(5), 6, 8, *range(10, 15), 17], np.uint32)
    values = np.random.default_rng(0).standard_normal(compact.size).astype(np.float32)
    out = np.full(rows.size * width, 3, np.float32)
    expected = out.copy()
    for place, value in zip([*range(5), 11, 13, *range(15, 20), 22], values, strict=True):
        expected[place] += np.float32(0.3) * value
    for k in range(1, compact.size + 1):
        result = fence(out)
        touched = own[: np.unique(compact[:k] // width).size]
        add_compact(result, fence(rows), fence(touched), width, fence(compact[:k]), fence(values[:k]), np.float32(0.3))
    slots, sums = fence(np.array([1, 0, 1])), fence(np.zeros((2, 3), np.float32).reshape(-1)).reshape(2, 3)
    add_rows(sums, slots, fence(np.arange(9, dtype=np.float32)).reshape(3, 3))
    return result.tobytes() == expected.tobytes() and sums.tolist() == [[3, 4, 5], [6, 8, 10]]


def test_adding():
    assert check_adding(np.copy)
    assert survives(check_adding), "outside its arrays"

"""Sums of sparse and dense values against numpy. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support import reference_kernels
from support.guards import guarded
from support.kernel_inputs import ascending

from grace_ext import kernels
from grace_ext.kernels.second_moment import square_sums


def shares_below(d, ranks, seed=0):
    """Overlapping sparse vectors, one of them empty, one in a single place, one dense at the start."""
    rng = np.random.default_rng(seed)
    sizes = [min(d, n) for n in (0, 1, 300, *(int(rng.integers(1, 2000)) for _ in range(ranks - 3)))]
    found = [(ascending(d, n, seed + n), rng.standard_normal(n).astype(np.float32)) for n in sizes]
    found[2] = (np.arange(sizes[2], dtype=np.uint32), found[2][1])
    return found


def run_sum_sparse(out, shares, weight, *squares, kernel=kernels.sum_sparse):
    ends = np.cumsum([p.size for p, _ in shares])
    starts = np.concatenate([[0], ends[:-1]])
    kernel(
        out,
        np.concatenate([p for p, _ in shares]),
        np.concatenate([v for _, v in shares]),
        starts.astype(np.int64),
        ends.astype(np.int64),
        np.float32(weight),
        *squares,
    )


@pytest.mark.parametrize("d", [1, 100, 32767, 32768, 32769, 100_000])
def test_sum_sparse(d):
    shares = shares_below(d, 5)
    out, intact = guarded(d, np.float32)
    run_sum_sparse(out, shares, 0.3)
    assert out.tobytes() == reference_kernels.sum_sparse(d, shares, 0.3).tobytes() and intact()


@pytest.mark.parametrize("d", [1, 100, 32767, 32768, 32769, 100_000])
@pytest.mark.parametrize("counted", [[1] * 5, [0.1, 0.7, 1, 2, 0.3]])
def test_mean_sparse(d, counted):
    parts = shares_below(d, 5)
    out, intact = guarded(d, np.float32)
    ends = np.cumsum([p.size for p, _ in parts])
    joined = (np.concatenate([part[i] for part in parts]) for i in range(2))
    kernels.mean_sparse(out, *joined, np.append(0, ends[:-1]), ends, np.array(counted, np.float32))
    assert out.tobytes() == reference_kernels.mean_sparse(d, parts, counted).tobytes() and intact()


@pytest.mark.parametrize("d", [1, 100, 32767, 32768, 32769, 100_000])
@pytest.mark.parametrize("ranks", [3, 5])
def test_sum_sparse_at(d, ranks):
    """Each element that some rank has, once, also where the sum is zero."""
    shares = shares_below(d, ranks)
    shares.append((shares[-1][0], -shares[-1][1]))
    expected, total = reference_kernels.sum_sparse(d, shares, 0.3), sum(p.size for p, _ in shares)
    (at, intact), (sums, unharmed) = guarded(total, np.uint32), guarded(total, np.float32)
    ends = np.cumsum([p.size for p, _ in shares])
    joined = (np.concatenate([share[i] for share in shares]) for i in range(2))
    n = kernels.sum_sparse_at(d, *joined, np.append(0, ends[:-1]), ends, np.float32(0.3), at, sums)
    assert at[:n].tolist() == np.unique(np.concatenate([p for p, _ in shares])).tolist()
    assert sums[:n].tobytes() == expected[at[:n]].tobytes() and intact() and unharmed()


@pytest.mark.parametrize("offset", [0, 1, 3, 15])
@pytest.mark.parametrize("more", [-1, 0, 17])
def test_sum_sparse_streamed(offset, more):
    """From 4 Mi floats on, tiles are written past the caches, which needs 64-byte addresses: any other start must do."""
    d = 4 * 1024 * 1024 + more
    whole = np.full(d + 64, 7, np.float32)
    first = (-(whole.ctypes.data >> 2)) % 16 + offset
    out = whole[first : first + d]
    assert out.ctypes.data % 64 == 4 * offset
    shares = shares_below(d, 4) + [(np.array([0, 14, 15, 16, 32783, d - 1], np.uint32), np.arange(1, 7).astype(np.float32))]
    run_sum_sparse(out, shares, 0.7)
    assert out.tobytes() == reference_kernels.sum_sparse(d, shares, 0.7).tobytes()
    assert (whole[:first] == 7).all() and (whole[first + d :] == 7).all()


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize(
    "shapes",
    [[(1, 1)], [(7, 300), (0, 0), (40, 1), (1, 40)], [(3, 40_000), (100, 700)], [(2050, 2048), (5, 333), (2, 40_000)]],
)
def test_sum_sparse_with_the_squares_of_rows_and_columns(shapes, offset):
    """With the last shapes, out is written past the caches."""
    d = sum(rows * columns for rows, columns in shapes)
    shares = shares_below(d, 5)
    expected, out = np.empty(d, np.float32), np.full(d + 16, 7, np.float32)
    run_sum_sparse(expected, shares, 0.3)
    sums = np.full(sum(map(sum, shapes)), np.nan, np.float32)
    run_sum_sparse(out[offset : offset + d], shares, 0.3, np.array(shapes), sums, kernel=kernels.sum_sparse_squares)
    assert out[offset : offset + d].tobytes() == expected.tobytes()
    assert (out[:offset] == 7).all() and (out[offset + d :] == 7).all()
    start = at = 0
    for rows, columns in shapes:
        by_row, by_column = np.empty(rows, np.float32), np.empty(columns, np.float32)
        square_sums(expected[start : start + rows * columns], by_row, by_column)
        assert sums[at : at + rows + columns].tobytes() == by_row.tobytes() + by_column.tobytes()
        start, at = start + rows * columns, at + rows + columns


def test_add_dense():
    rng = np.random.default_rng(1)
    values, start = (rng.standard_normal(1003).astype(np.float32) for _ in range(2))
    out, intact = guarded(1003, np.float32)
    out[:] = start
    kernels.add_dense(out, values, np.float32(0.3))
    expected = [x + np.float32(0.3) * y for x, y in zip(start, values, strict=True)]
    assert out.tobytes() == np.array(expected, np.float32).tobytes() and intact()


def test_add_at_and_write_error():
    positions, rng = ascending(1000, 321), np.random.default_rng(1)
    values, decoded, start = (rng.standard_normal(n).astype(np.float32) for n in (321, 321, 1000))
    out, intact = guarded(1000, np.float32)
    out[:] = start
    kernels.add_at(out, positions, values, np.float32(0.3))
    expected = start.copy()
    expected[positions] += np.float32(0.3) * values
    assert out.tobytes() == expected.tobytes() and intact()
    kernels.write_error(out, positions, values, decoded)
    expected[positions] = values - decoded
    assert out.tobytes() == expected.tobytes() and intact()

"""select_topk against its reference implementation, on every branch. test_cpus.py runs it, too."""

import numpy as np
import pytest
from support import reference_kernels

from grace_ext.kernels import select_topk
from grace_ext.kernels._helpers import STREAMED
from grace_ext.kernels._ranks import BINS
from grace_ext.kernels.topk import SLACK, candidate_room, sample_room
from grace_ext.sparsifiers import topk as sparsifier


def run(values, k, residual=None, out=None, candidates=None):
    """(positions, values at them) of select_topk(values [+ residual -> out]), from fresh arrays with guards."""
    d = values.size
    room = candidate_room(d, k) if candidates is None else candidates + SLACK
    arrays = [np.full(room + 64, 0xA5A5A5A5, np.uint32) for _ in range(3)]
    sample = np.full(sample_room(d) + 64, 0xA5A5A5A5, np.uint32)
    fused = residual is not None
    n = select_topk(
        values,
        residual if fused else values,
        out if fused else np.empty(0, np.float32),
        fused,
        k,
        *(array[:room] for array in arrays),
        sample[:-64],
        np.empty(BINS, np.int64),
    )
    for guard in (sample, *arrays):
        assert (guard[-64:] == 0xA5A5A5A5).all(), "written behind the end"
    return arrays[0][:n], arrays[1][:n].view(np.float32)


def check(values, k, branch=None, candidates=None):
    """Plain, fused, and fused in place all select what the reference implementation does; the branch is the one that the test is about."""
    values = np.ascontiguousarray(values, np.float32)
    limit = candidate_room(values.size, k) - SLACK if candidates is None else candidates
    if branch:
        assert reference_kernels.topk_branch(values, k, sample_room(values.size), limit) == branch
    expected = reference_kernels.topk(values, k)
    positions, found = run(values, k, candidates=candidates)
    assert np.array_equal(positions, expected)
    assert found.tobytes() == values[expected].tobytes()

    rng = np.random.default_rng(5)
    residual = np.where(rng.random(values.size) < 0.5, values, np.float32(0)) * np.float32(0.5)
    gradient = values - residual
    total = gradient + residual
    expected = reference_kernels.topk(total, k)
    for out in (np.full_like(gradient, 9), gradient):  # the last one is in place
        positions, found = run(gradient, k, residual, out, candidates)
        assert np.array_equal(positions, expected)
        assert found.tobytes() == total[expected].tobytes()
        assert out.tobytes() == total.tobytes()


def gauss(d, seed=0):
    return np.random.default_rng(seed).standard_normal(d).astype(np.float32)


@pytest.mark.parametrize("d", [1, 2, 15, 16, 17, 31, 32, 33, 255, 511, 512, 513, 1023, 4095, 4096, 4097, 8192, 12289])
def test_sizes_around_the_borders(d):
    for k in sorted({1, 2, d // 100, d // 3, d - 1, d} & set(range(1, d + 1))):
        check(gauss(d, d), k)


@pytest.mark.parametrize("k", [1, 100, 1000, 30000, 150_000, 299_999, 300_000])
def test_large(k):
    check(gauss(300_001), k)


@pytest.mark.parametrize("d", [10, 1000, 50_000])
def test_zeros_are_never_selected(d):
    check(np.zeros(d), 5)
    check(-np.zeros(d), d)
    few = np.zeros(d)
    few[[1, d // 2, d - 1]] = 1e-45, -3, 2e-40
    check(few, 2)
    check(few, 3)
    check(few, 9)
    check(few, d)


@pytest.mark.parametrize("d", [40, 5000, 200_000])
def test_ties_go_to_the_lowest_index(d):
    check(np.full(d, -2.5), 7)
    signs = np.where(np.arange(d) % 3 == 0, 1.0, -1.0)
    check(signs, d // 2)
    levels = np.random.default_rng(0).integers(0, 4, d) * signs  # four magnitudes, a quarter of it zero
    for k in (1, d // 8, d // 4, d // 4 + 1, d // 2, d):
        check(levels, k)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -np.nan])
def test_a_non_finite_element_is_always_selected(special):
    for d in (5, 33, 70_000):
        for at in (0, d // 2, d - 1):
            values = gauss(d)
            values[at] = special
            positions, found = run(values, 1)
            assert positions.tolist() == [at] and not np.isfinite(found[0])


def test_extreme_magnitudes():
    values = gauss(20_000)
    values[::7] *= np.float32(5e37)
    values[::11] *= np.float32(1e-42)
    values[3], values[-1] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    for k in (1, 2, 3, 2000, 19_000):
        check(values, k)


def test_same_upper_bits():
    """Magnitudes that differ in the last 9 bits only: the bounds of the sample cannot tell them apart."""
    bits = np.uint32(0x3F800000) + np.random.default_rng(0).integers(0, 512, 100_000).astype(np.uint32)
    for k in (1, 50, 1000, 50_000):
        check(bits.view(np.float32), k)


# The branches. What the sample sees is known: reference_kernels.sampled tells which positions it reads.

D = 200_000


def split():
    """(sampled positions, the others)."""
    seen = np.zeros(D, bool)
    seen[reference_kernels.sampled(D, sample_room(D))] = True
    assert 0.01 < seen.mean() < 0.02
    return np.flatnonzero(seen), np.flatnonzero(~seen)


def test_branch_band():
    check(gauss(D), 2000, "band")


def test_branch_all_candidates():
    values = np.zeros(D)
    values[::1000] = gauss(D // 1000)
    check(values, 500, "all candidates")


def test_branch_too_few_large_values_in_sampled_lines_only():
    seen, _ = split()
    values = gauss(D) * np.float32(1e-3)
    values[seen] = 1 + abs(gauss(seen.size))
    check(values, 4000, "too few")


def test_branch_too_few_with_ties_and_zeros():
    seen, others = split()
    values = np.zeros(D)
    values[seen[:1500]], values[others[:50]] = 2, 1
    check(values, 1520, "too few")
    check(values, 1560, "too few")  # more than there are


def test_branch_overflow_large_values_outside_sampled_lines_only():
    seen, _ = split()
    values = 1 + abs(gauss(D))
    values[seen] *= np.float32(1e-3)
    check(values, 10, "overflow")
    check(values, 20_000, "overflow")


def test_branch_overflow_in_the_first_or_in_the_last_block():
    """The candidates outgrow their room early, or only in the block after which it is checked no more."""
    for where in (slice(0, 3000), slice(D - 3000, D)):
        values = gauss(D) * np.float32(1e-3)
        values[where] = 1 + abs(gauss(3000))
        values[reference_kernels.sampled(D, sample_room(D))] = 1e-6
        check(values, 1000, "overflow", candidates=2000)


def test_branch_upper_bound_too_low():
    seen, others = split()
    values = gauss(D) * np.float32(1e-3)
    values[others[::8]] = 1 + abs(gauss(others[::8].size))
    values[seen] = gauss(seen.size) * np.float32(1e-2)
    check(values, 5000, "upper bound too low")


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_as_many_above_the_upper_bound_as_are_wanted(off):
    seen, others = split()
    values, k = gauss(D) * np.float32(1e-3), 5000
    values[seen] = gauss(seen.size) * np.float32(1e-2)
    upper = reference_kernels.topk_bounds(values, k, sample_room(D))[1]
    count = k + off - int((reference_kernels.magnitudes(values) >= upper).sum())
    values[others[::8][:count]] = 1 + abs(gauss(count))
    assert (reference_kernels.magnitudes(values) >= upper).sum() == k + off
    check(values, k, "band" if off < 0 else "upper bound too low")


def test_sorted_and_clustered():
    for values in (np.linspace(1, 2, D), np.linspace(-2, -1, D), np.repeat(gauss(D // 500), 500)):
        for k in (20, 2000, 90_000):
            check(values, k)
    cluster = gauss(D) * np.float32(1e-4)
    cluster[70_000:72_000] = 1 + abs(gauss(2000))
    for k in (100, 1999, 2000, 2001, 5000):
        check(cluster, k)


SPLITS = [[50_000], [1, 0, 15, 16, 17, 49_951], [25_000, 25_000], [3] * 10_000 + [20_000], [49_999, 1]]


@pytest.mark.parametrize("sizes", SPLITS, ids=range(len(SPLITS)))
@pytest.mark.parametrize("k", [1, 500, 20_000, 50_000])
@pytest.mark.parametrize("kind", ["gauss", "sorted", "rare", "zeros", "nan"])
def test_parts_give_what_one_array_does(sizes, k, kind):
    gradient, residual = gauss(50_000, 1), gauss(50_000, 2)
    if kind == "sorted":  # the last parts have all of the largest
        gradient = np.sort(gradient)
    elif kind == "rare":
        gradient[:-70] *= np.float32(1e-3)
        residual[:] = 0
    elif kind == "zeros":
        gradient[100:], residual[100:] = 0, 0
    elif kind == "nan":
        gradient[[5, 40_000]] = np.nan, -np.inf
    expected = np.empty_like(gradient)
    positions, found = (array.copy() for array in sparsifier.select_largest(gradient, residual, expected, True, k))
    inside = gradient.copy()
    for given, out in ((gradient, np.full_like(gradient, 9)), (inside, inside)):  # the last one is in place
        parts = np.split(given, np.cumsum(sizes)[:-1])
        again, values = sparsifier.select_largest_of_parts(parts, residual, out, k)
        assert out.tobytes() == expected.tobytes()
        if kind == "nan":
            assert not np.isfinite(values).all()
        else:
            assert np.array_equal(again, positions) and values.tobytes() == found.tobytes()


def test_parts_without_room_for_their_candidates(monkeypatch):
    """The sample has seen none of the large ones, so there are more candidates than room; what follows is added all the same."""
    gradient = gauss(50_000, 1)
    monkeypatch.setattr(sparsifier, "candidate_room", lambda d, k: 6000 + SLACK)
    for sizes in ([50_000], [20_000, 10_000, 20_000]):
        out = np.empty_like(gradient)
        parts = np.split(gradient, np.cumsum(sizes)[:-1])
        positions, values = sparsifier.select_largest_of_parts(parts, np.ones_like(gradient), out, 10_000)
        total = gradient + np.float32(1)
        expected = reference_kernels.topk(total, 10_000)
        assert np.array_equal(positions, expected) and values.tobytes() == total[expected].tobytes()
        assert out.tobytes() == total.tobytes()


@pytest.mark.parametrize("offset", [0, 1, 16])
def test_sums_that_bypass_the_caches(offset):
    d = STREAMED + 12_345
    gradient, residual = gauss(d, 1), gauss(d, 2)
    out = np.zeros(d + 32, np.float32)
    at = -(out.ctypes.data >> 2) % 16 + offset  # offset 1 is not at the beginning of a line, and does not bypass
    expected = reference_kernels.topk(gradient + residual, 50_000)
    positions, found = run(gradient, 50_000, residual, out[at : at + d])
    assert np.array_equal(positions, expected) and found.tobytes() == (gradient + residual)[expected].tobytes()
    assert out[at : at + d].tobytes() == (gradient + residual).tobytes()
    assert not out[:at].any() and not out[at + d :].any()


def test_large_sums_in_place():
    gradient, residual = gauss(STREAMED + 5, 1), gauss(STREAMED + 5, 2)
    total = gradient + residual
    expected = reference_kernels.topk(total, 50_000)
    for out in (0, 1):
        given = [gradient.copy(), residual.copy()]
        positions, found = run(given[0], 50_000, given[1], given[out])
        assert np.array_equal(positions, expected) and found.tobytes() == total[expected].tobytes()
        assert given[out].tobytes() == total.tobytes()

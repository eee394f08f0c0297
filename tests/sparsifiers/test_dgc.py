"""dgc: a threshold from a sample."""

import numpy as np
import pytest
from support import reference_kernels
from support.selection import select

from grace_ext._util.rng import Stream
from grace_ext.kernels._ranks import BINS
from grace_ext.kernels.topk import sampled_bound


def heavy(d, seed=0):
    return np.random.default_rng(seed).standard_t(2, d).astype(np.float32)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_dgc_selects_about_k(density):
    """The threshold's rank in the sample is at least 400, so a fifth of k is 4 sigma: 6e-5 for each of 30 tries."""
    d = 3_000_000
    for seed in range(10):
        found = select(f"dgc:{density}", heavy(d, seed), Stream(seed))
        assert 0.8 * density * d <= found.size <= 1.2 * density * d
    k = found.size
    assert np.array_equal(found, reference_kernels.topk(heavy(d, seed), k)), "not the largest of all"


def test_dgc_is_exact_where_the_sample_would_be_large():
    dense = heavy(20_000)
    assert np.array_equal(select("dgc:0.01", dense), reference_kernels.topk(dense, 200))
    assert np.array_equal(select("dgc:0.01:sample=1", dense), reference_kernels.topk(dense, 200))


def test_dgc_takes_the_largest_where_too_many_pass():
    """Ties and zeros: no quantile of them lets about k pass."""
    dense = np.random.default_rng(0).choice(np.array([0, 1, 2], np.float32), 3_000_000, p=[0.9, 0.099, 0.001])
    found = select("dgc:0.01", dense)
    assert np.array_equal(found, reference_kernels.topk(dense, 30_000))
    dense = np.zeros(3_000_000, np.float32)
    assert select("dgc:0.01", dense).size == 0
    dense[5000:7000] = heavy(2000)
    assert select("dgc:0.1", dense).size == 2000
    assert select("dgc:0.001", dense).size == 2000


def test_dgc_samples_by_the_stream():
    dense = heavy(3_000_000)
    sizes = {select("dgc:0.01", dense, Stream(step=step, rank=rank)).size for step in (0, 1) for rank in (0, 1)}
    assert len(sizes) > 1


@pytest.mark.parametrize("fused", [False, True])
def test_the_threshold_is_the_quantile_of_the_sampled_lines(fused):
    gradient, residual, lines = heavy(1000), heavy(1000, 1), np.array([0, 3, 17, 61], np.uint32)
    looked_at = np.concatenate([(gradient + fused * residual)[16 * line : 16 * line + 16] for line in lines])
    for rank in (1, 2, 40, 64):
        bound = sampled_bound(gradient, residual, fused, lines, rank, np.empty(128, np.uint32), np.empty(BINS, np.int64))
        expected = int(np.sort(abs(looked_at))[-rank].view(np.uint32)) >> 9 << 9
        assert bound == expected, rank


def test_the_first_lines_may_mislead():
    """The bound of every 16th line is far above, far below, or about as large as the quantile of all of them."""
    lines = np.arange(0, 512, 2, dtype=np.uint32)
    for scale in (1e6, 0, 1e-6, 1, np.inf):
        gradient = heavy(8192).reshape(-1, 32)
        gradient[::16] *= np.float32(scale)
        looked_at, gradient = np.sort(abs(gradient[:, :16]), axis=None), gradient.reshape(-1)
        for rank in (1, 40, 300, 3000, lines.size * 16):
            work = np.empty(32 * lines.size, np.uint32), np.empty(BINS, np.int64)
            bound = sampled_bound(gradient, gradient, False, lines, rank, *work)
            assert bound == max(1, int(looked_at[-rank].view(np.uint32)) >> 9 << 9), (scale, rank)

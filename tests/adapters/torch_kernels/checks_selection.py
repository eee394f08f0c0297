"""Top-k: the same positions and bits as the host's kernel, whatever the sample says, and the same sum."""

import numpy as np
from inputs import KINDS, same, tensor, vector, with_special
from support.checking import check

from grace_ext.adapters._torch.kernels import topk
from grace_ext.sparsifiers.topk import select_largest

BLOCK = topk.BLOCK
CASES = [(1, 1), (2, 1), (17, 5), (BLOCK - 1, 40), (BLOCK, BLOCK), (BLOCK + 1, 1), (3 * BLOCK + 5, 123)]


def compare(gradient, residual, k, **options):
    d = gradient.size
    summed = np.empty(d, np.float32)
    positions, values = select_largest(gradient, gradient if residual is None else residual, summed, residual is not None, k)
    own = tensor(gradient)
    found = topk.select_topk(own, None if residual is None else tensor(residual), own, k, **options)
    assert found.finite == bool(np.isfinite(values).all())
    if found.finite:
        assert same(own, gradient if residual is None else summed), "the sum"
        assert same(found.positions, positions), "positions"
        assert same(found.bits, values), "values"


@check
def the_same_elements_are_selected_and_the_sum_is_the_same():
    for kind in KINDS:
        for d, k in CASES:
            compare(vector(kind, d), vector(kind, d, 1), k)
        compare(vector(kind, 2 * BLOCK + 9), None, 77)


@check
def what_is_not_finite_is_seen_wherever_it_is():
    d = 2 * BLOCK + 3
    for special in (np.nan, np.inf, -np.inf):
        compare(with_special(vector("normal", d), special), vector("normal", d, 1), 5)
        compare(vector("normal", d), with_special(vector("normal", d, 1), special), 5)
        compare(with_special(vector("zeros", d), special), None, 5)
    largest = np.full(9, np.finfo(np.float32).max, np.float32)
    compare(largest, largest, 1)  # only the sum is not finite
    compare(largest, None, 1)


@check
def an_empty_gradient_has_no_elements_to_select():
    found = topk.select_topk(*3 * [tensor(np.empty(0, np.float32))], 0)
    assert found.finite and found.positions.numel() == found.bits.numel() == 0


@check
def a_sample_that_misleads_changes_nothing():
    """Too many candidates for the room, and too few because the sampled lines hold all that is large."""
    d, k = 3 * BLOCK + 5, 60
    for kind in ("equal", "ties", "clustered", "zeros"):
        compare(vector(kind, d), vector(kind, d, 1), k, spare=0)
    gradient = np.full(d, 1e-3, np.float32)
    lines = np.flatnonzero(sampled(d)).tolist()
    gradient[lines] = np.linspace(1, 2, len(lines))
    compare(gradient, np.zeros(d, np.float32), len(lines) + 200)
    gradient[lines] = 5.0
    compare(gradient, None, len(lines) // 2)


def sampled(d):
    """Which elements the sample has, found by a gradient that holds their numbers."""
    lines = topk.sample_size(d) // 16
    out = tensor(np.zeros(16 * lines, np.int32))
    numbers = tensor(np.arange(d, dtype=np.float32))
    topk.launch(topk.sample_bits, -(-16 * lines // 1024), numbers, numbers, out, d, lines, FUSED=False, BLOCK=1024)
    found = np.zeros(d, bool)
    found[out.numpy().view(np.float32).astype(int)] = True
    assert found.sum() == 16 * lines and (np.flatnonzero(found)[::16] % 16 == 0).all()
    return found


@check
def the_kth_largest_is_exact_to_the_last_bit():
    """Neighbours differ in the lowest of the bits that each round of the radix selection finds."""
    for shift in (0, 8, 9, 19, 20, 22):
        bits = np.uint32(0x3F800000) + (np.arange(500, dtype=np.uint32) % 7 << np.uint32(shift))
        gradient = np.random.default_rng(shift).permutation(bits).view(np.float32)
        for k in (1, 71, 72, 73, 300, 500):
            compare(gradient, None, k)

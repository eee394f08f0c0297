"""Top-k: the same positions and bits as the host's kernel, whatever the sample says, and the same sum."""

import numpy as np
import torch
from inputs import KINDS, STREAM, same, tensor, vector, with_special
from support.checking import check

from grace_ext.adapters._torch.device_selection import fits, select
from grace_ext.adapters._torch.kernels import packed, topk
from grace_ext.adapters._torch.kernels.block_topk import MOST_ELEMENTS
from grace_ext.adapters._torch.kernels.parts import Parts
from grace_ext.memory.packed_vector import PackedVector
from grace_ext.sparsifiers.adaq import AdaQ
from grace_ext.sparsifiers.base import Scope
from grace_ext.sparsifiers.dgc import DGC
from grace_ext.sparsifiers.nonzero import NonZero
from grace_ext.sparsifiers.randomk import RandomK
from grace_ext.sparsifiers.threshold import Threshold
from grace_ext.sparsifiers.topk import TopK, select_largest
from grace_ext.transforms.dct import DCT

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


SIZES = (0, 1, 300, 210, 0, 40)


def compare_parts(sparsifier, given, residual, sizes):
    own, summed, scope = tensor(given), np.empty_like(given), Scope(STREAM, sizes)
    found = select(sparsifier, own, None if residual is None else tensor(residual), sizes, STREAM)
    if residual is None:
        positions, values = sparsifier.select(given, scope)
    else:
        positions, values = sparsifier.select_compensated(given, residual, summed, scope)
        assert same(own, summed)
    assert found.finite and same(found.positions, positions) and same(found.bits, values), (str(sparsifier), sizes)


@check
def the_same_elements_of_each_tensor_and_each_block_are_selected():
    """Each block is a program, which takes the interpreter milliseconds."""
    d = sum(SIZES)
    for number, kind in enumerate(KINDS):
        for sparsifier in (TopK(0.02, "tensor"), TopK(0.1, "100"), TopK(1.0, "128")):
            compare_parts(sparsifier, vector(kind, d), vector(kind, d, 1) if number % 2 else None, SIZES)
    compare_parts(TopK(0.3, "7"), vector("ties", d), vector("ties", d, 1), SIZES)
    most = MOST_ELEMENTS
    large = (most + 9, 2 * most - 1)
    for per in ("tensor", str(most)):
        compare_parts(TopK(0.01, per), vector("normal", sum(large)), vector("normal", sum(large), 1), large)
    for per in ("tensor", "100"):
        assert not select(TopK(0.01, per), tensor(with_special(vector("normal", d), np.inf)), None, SIZES, STREAM).finite
        empty = select(TopK(0.01, per), tensor(np.empty(0, np.float32)), None, (0, 0), STREAM)
        assert empty.finite and not empty.positions.numel()


@check
def all_other_sparsifiers_that_rank_by_magnitude_select_the_same():
    """Also where there are more elements than there was room for, and where dgc's sample lets too many pass."""
    for number, kind in enumerate(("normal", "ties", "denormal", "huge", "zeros")):
        for sparsifier in (Threshold(0.7), Threshold(1e-39), NonZero(), AdaQ(0.1), DGC(0.1)):
            d = 1 if kind == "huge" and sparsifier.name != "threshold" else 9000
            with np.errstate(over="ignore"):
                compare_parts(sparsifier, vector(kind, d), vector(kind, d, 1) if number % 2 else None, (d,))
    compare_parts(DGC(0.5), vector("normal", 60_000), None, (60_000,))
    compare_parts(DGC(0.5), vector("ties", 60_000), vector("ties", 60_000, 1), (60_000,))
    for sparsifier, d in ((Threshold(0.7), 5), (NonZero(), 9000), (DGC(0.5), 60_000), (AdaQ(0.1), 9000)):
        assert fits(sparsifier, None)
        given = tensor(with_special(vector("normal", d), np.nan if d == 9000 else -np.inf))
        assert not select(sparsifier, given, tensor(vector("normal", d, 1)), (d,), STREAM).finite
        assert not select(sparsifier, tensor(np.empty(0, np.float32)), None, (0,), STREAM).positions.numel()
    assert DGC(0.5).lines(60_000) and not fits(RandomK(0.1), None) and not fits(Threshold(0.7), DCT())


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
    topk.launch(
        topk.sample_bits, -(-16 * lines // 1024), numbers, numbers, out, d, lines, 0, FUSED=False, PARTS=False, BLOCK=1024
    )
    found = np.zeros(d, bool)
    found[out.numpy().view(np.float32).astype(int)] = True
    assert found.sum() == 16 * lines and (np.flatnonzero(found)[::16] % 16 == 0).all()
    return found


@check
def a_sum_that_is_rounded_at_once_is_what_packing_it_keeps():
    """Also where the sample misleads, so that the sum is needed again."""
    for kind in KINDS:
        for d, k, spare in ((1, 1, 9), (BLOCK + 1, 40, 9), (3 * BLOCK + 5, 60, 0)):
            gradient, residual = vector(kind, d), PackedVector(d, 16).filled(vector(kind, d, 1))
            summed = gradient + residual.unpacked(np.empty(d, np.float32))
            positions, values = select_largest(summed, summed, np.empty(d, np.float32), False, k)
            halves, following = (torch.zeros(d, dtype=torch.int16) for _ in range(2))
            packed.pack(tensor(residual.unpacked(np.empty(d, np.float32))), halves, None)
            found = topk.select_topk(tensor(gradient), halves.view(torch.bfloat16), following, k, spare)
            assert found.finite and same(found.positions, positions) and same(found.bits, values), (kind, d)
            kept = PackedVector(d, 16).filled(summed)
            assert same(following.view(torch.bfloat16).float(), kept.unpacked(np.empty(d, np.float32))), (kind, d)


@check
def a_gradient_in_several_tensors_is_the_same_in_one():
    """Also tensors without elements, shorter than a sampled line, and where the sample misleads."""
    for sizes in ((1,), (0, 5, 0), (BLOCK, 1, 0, 3, BLOCK + 7), (3, 2 * BLOCK + 5, 9, 100)):
        for kind, spare in (("normal", 9), ("ties", 0), ("denormal", 9), ("zeros", 0)):
            d, k = sum(sizes), max(1, sum(sizes) // 80)
            gradient, residual, summed = vector(kind, d), vector(kind, d, 1), np.empty(d, np.float32)
            positions, values = select_largest(gradient, residual, summed, True, k)
            tensors, out = [tensor(part) for part in np.split(gradient, np.cumsum(sizes)[:-1])], torch.zeros(d)
            parts = Parts(tensors, topk.parts_layout(sizes))
            assert same(parts.joined(), gradient)
            found = topk.select_topk(parts, tensor(residual), out, k, spare)
            assert found.finite and same(found.positions, positions) and same(found.bits, values), (sizes, kind)
            assert same(out, summed) and same(parts.joined(), gradient)
            if kind != "denormal":
                halves, kept = tensor(residual).bfloat16(), torch.zeros(d, dtype=torch.int16)
                total = gradient + halves.float().numpy()
                positions, values = select_largest(total, total, np.empty(d, np.float32), False, k)
                found = topk.select_topk(parts, halves, kept, k, spare)
                assert same(found.positions, positions) and same(found.bits, values), (sizes, kind)
    special = Parts([tensor(with_special(vector("normal", 50), np.inf))], topk.parts_layout((50,)))
    assert not topk.select_topk(special, torch.zeros(50), torch.zeros(50), 3).finite


@check
def a_table_of_addresses_is_made_anew_only_if_one_has_changed():
    layout, tensors = topk.parts_layout((5000, 3)), [torch.zeros(5000), torch.zeros(3)]
    table = layout.table(tensors)
    assert layout.table(tensors) is table
    moved = [tensors[0], torch.zeros(3)]
    found = layout.table(moved)
    assert torch.equal(found, topk.parts_layout((5000, 3)).table(moved)) and not torch.equal(found, table)


@check
def the_kth_largest_is_exact_to_the_last_bit():
    """Neighbours differ in the lowest of the bits that each round of the radix selection finds."""
    for shift in (0, 8, 9, 19, 20, 22):
        bits = np.uint32(0x3F800000) + (np.arange(500, dtype=np.uint32) % 7 << np.uint32(shift))
        gradient = np.random.default_rng(shift).permutation(bits).view(np.float32)
        for k in (1, 71, 72, 73, 300, 500):
            compare(gradient, None, k)

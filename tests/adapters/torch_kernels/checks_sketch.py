"""Sketches of tensors: the host's in every bit."""

import numpy as np
import torch
from inputs import KINDS, same, tensor, vector
from support.checking import check

from grace_ext.adapters._torch.kernels.sketch import AT_ONCE, BLOCK, SUMS, Sketcher
from grace_ext.kernels.second_moment import LANES, random_sketch

KEYS = (5, 77), (0xFFFFFFFF, 0x80000001)


@check
def sketches_are_the_host_s_in_every_bit():
    most = AT_ONCE * BLOCK
    for kind in KINDS:
        for sizes in (
            (1,),
            (7, 8, 9),
            (0, 255, 256, 257, 0),
            (most - 1, most, most + 1, 3 * most + 700),
            (2 * SUMS * BLOCK + 700,),
        ):
            given, key = vector(kind, sum(sizes)), KEYS[len(sizes) % 2]
            expected = np.empty((len(sizes), LANES), np.float32)
            for part, sketch in zip(np.split(given, np.cumsum(sizes)[:-1]), expected, strict=True):
                random_sketch(part, *map(np.uint32, key), sketch)
            assert same(Sketcher(sizes, "cpu").sketches(tensor(given), key), expected), (kind, sizes)


@check
def sketches_of_what_is_not_finite_are_not():
    given = vector("normal", 600)
    given[300] = np.nan
    found = Sketcher((200, 400), "cpu").sketches(tensor(given), KEYS[0])
    assert torch.isfinite(found[0]).all() and not torch.isfinite(found[1]).all()

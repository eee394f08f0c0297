"""Random streams: uniform, other for every part of their key, and apart from the user's generators."""

import math
import random
import subprocess
import sys

import numpy as np
import pytest
from support import reference_kernels
from support.arrays import gauss

import grace_ext
from grace_ext._util.rng import Stream


def test_random_numbers_are_uniform():
    """Chi-square of the reference implementation's upper byte: 255 degrees of freedom, within 6 sigma of its mean (probability < 1e-7)."""
    low, high = Stream(seed=1).key()
    counts = np.bincount([reference_kernels.random32(i, low, high) >> 24 for i in range(65536)], minlength=256)
    chi_square = ((counts - 256) ** 2 / 256).sum()
    assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


def test_keys_differ_in_every_part():
    keys = {
        Stream(*key).key()
        for key in (
            (0, "", 0, 0),
            (1, "", 0, 0),
            (0, "", 1, 0),
            (0, "", 0, 1),
            (0, "a", 0, 0),
            (1, "", 1, 0),
            (1, "", 0, 1),
            (0, "", 1, 1),
            (-1, "", 0, 0),
            (0, "\0", 0, 0),
        )
    }
    assert len(keys) == 10
    shared = {Stream(0, "a", 1, rank).shared().key() for rank in range(4)}
    assert len(shared) == 1 and not shared & {Stream(0, "a", 1, rank).key() for rank in range(4)}
    assert Stream(5, "conv1.wéight\udc80", 7, 3).key() == Stream(5, "conv1.wéight\udc80", 7, 3).key()


def test_the_users_generators_are_left_alone():
    """Neither drawn from nor seeded: their state is as it was, and other seeds there change nothing here."""

    def work():
        c = grace_ext.compressor("topk:0.1/rice/qsgd:4", seed=3)
        blob = c.compress(gauss(5000), name="w", step=1)
        grace_ext.decompress(blob, 5000)
        return blob.tobytes()

    random.seed(1)
    np.random.seed(1)
    python, numpy = random.getstate(), np.random.get_state()
    first = work()
    assert random.getstate() == python
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True))
    random.seed(2)
    np.random.seed(2)
    assert work() == first


def test_torchs_generator_is_left_alone():
    pytest.importorskip("torch")
    code = (
        "import torch, numpy as np, grace_ext\n"
        "torch.manual_seed(1)\n"
        "before = torch.get_rng_state().clone()\n"
        "g = torch.randn(5000, generator=torch.Generator().manual_seed(0)).numpy()\n"
        "c = grace_ext.compressor('topk:0.1/rice/qsgd:4')\n"
        "grace_ext.decompress(c.compress(g), 5000)\n"
        "assert torch.equal(torch.get_rng_state(), before)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_shared_stream_is_the_same_for_all_ranks_and_no_ranks_own():
    streams = [Stream(seed=3, name="w", step=7, rank=rank) for rank in range(4)]
    assert len({stream.shared().key() for stream in streams}) == 1
    assert streams[0].shared().key() not in {stream.key() for stream in streams}
    assert streams[0].shared() != Stream(seed=3, name="w", step=8).shared()


def test_keys_are_the_same_on_every_machine():
    assert Stream(seed=1, name="w", step=2, rank=3).key() == (3391041679, 1880595295)
    assert Stream(name="\udcff").key() != Stream(name="?").key()  # a name that is no Unicode text

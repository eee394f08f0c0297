"""Positions as real gradients give them."""

import functools

import numpy as np

from grace_ext import registry
from support import codec_conformance

LOSSLESS = [name for name in codec_conformance.index_codecs() if registry.lookup("index", name).lossless]


FIXED = [
    name
    for name in LOSSLESS
    if registry.lookup("index", name).id is not None and not registry.lookup("index", name).composite
]


HUGE = 2**31 - 1


def ascending(d, k, seed=0):
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(d, k, replace=False)).astype(np.uint32)


def blocks(starts, length):
    return (np.asarray(starts)[:, None] + np.arange(length)).reshape(-1).astype(np.uint32)


@functools.cache
def inputs():
    """name -> (indices, d), as sparsified gradients have them; some thousand positions at most."""
    rng = np.random.default_rng(5)
    found = {
        "rows of an embedding": (blocks(96 * ascending(2000, 30), 96), 2000 * 96),
        "rows with holes": (blocks(96 * ascending(2000, 30), 96)[rng.random(30 * 96) < 0.8], 2000 * 96),
        "blocks of channels": (blocks(576 * ascending(64, 5), 9 * 7), 576 * 64),
        "two densities": (np.r_[ascending(10_000, 2000), 10_000 + ascending(300_000, 700)].astype(np.uint32), 310_000),
        "scales that vary": (
            np.cumsum(1 + rng.geometric(2.0 ** -np.repeat(rng.integers(1, 12, 20), 100))).astype(np.uint32),
            10**7,
        ),
        "every third": (np.arange(0, 9000, 3, dtype=np.uint32), 9000),
        "all": (np.arange(5000, dtype=np.uint32), 5000),
        "all but one": (np.delete(np.arange(5000), 2500).astype(np.uint32), 5000),
        "random 1 %": (ascending(200_000, 2000), 200_000),
        "first of many": (np.zeros(1, np.uint32), HUGE),
        "last of many": (np.array([HUGE - 1], np.uint32), HUGE),
        "both ends": (np.array([0, HUGE - 1], np.uint32), HUGE),
        "ends of many": (np.r_[0:700, HUGE - 900 : HUGE].astype(np.uint32), HUGE),
        "all lengths of gaps": (np.cumsum([1 << i for i in range(31)]).astype(np.uint32) - 1, HUGE),
    }
    for bits in (7, 14, 21, 28):  # where a varint gets a byte longer
        found[f"around 2**{bits}"] = (np.cumsum(1 + (1 << bits) + np.arange(-2, 3)).astype(np.uint32), HUGE)
    return found


def fits(name, d):
    return name != "bitmap" or d < 10**8  # a bitmap has d bits by definition

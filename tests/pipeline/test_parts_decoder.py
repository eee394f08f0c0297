"""Decoding a sum to several vectors."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits

import grace_ext
from grace_ext import ContainerError
from grace_ext.kernels._helpers import STREAMED
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.decoder import decode_sum
from grace_ext.pipeline.parts_decoder import decode_sum_to_parts

NON_FINITE = "topk:0.1/rice/raw with an Inf"


def container_of(spec, seed, d):
    gradient = gauss(d, seed)
    if spec == NON_FINITE:
        gradient[d // 2], spec = np.inf, "topk:0.1/rice/raw"
    return parse(grace_ext.compressor(spec).compress(gradient), d)


@pytest.mark.parametrize(
    "specs",
    [
        ["topk:0.1/rice/raw"] * 3,
        ["topk:0.01/bloom:policy=p2/qsgd:7", "topk:1/rice/raw", "nonzero/raw"],
        ["topk:0.1/rice/raw", "dense/raw", "nonzero/raw"],
        ["dct/topk:0.1/rice/raw"] * 2,
        ["topk:0.1/rice/raw", NON_FINITE],
        [],
    ],
)
@pytest.mark.parametrize("sizes", [[600], [1, 0, 599], [100, 200, 300], [0, 600, 0], [STREAMED + 3, 17, STREAMED + 30]])
def test_the_bits_are_those_of_one_array(specs, sizes):
    d = sum(sizes)
    containers = [container_of(spec, seed, d) for seed, spec in enumerate(specs)]
    whole = np.empty(d, np.float32)
    decode_sum(containers, whole, 0.3)
    room = np.full(d + 3 * len(sizes), 7, np.float32)  # the parts lie in it, with other things between them
    starts = np.cumsum([0, *(size + 3 for size in sizes[:-1])])
    parts = [room[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    decode_sum_to_parts(containers, parts, 0.3)
    assert same_bits(np.concatenate(parts), whole)
    for part in parts:
        part[:] = 7
    assert np.all(room == 7)


def test_a_container_of_another_size_is_refused():
    for sizes in ([600, 1], [599], []):
        with pytest.raises(ContainerError, match=f"{sum(sizes)} were expected"):
            decode_sum_to_parts([container_of("topk:0.1/rice/raw", 0, 600)], [np.zeros(n, np.float32) for n in sizes])

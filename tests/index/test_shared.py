"""shared: positions that every rank draws for itself take no bytes."""

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss, read_only, same_bits
from support.reference_kernels import sparse as reference_sparse

import grace_ext
from grace_ext import ContainerError
from grace_ext._util.rng import Stream
from grace_ext.index.shared import Shared
from grace_ext.pipeline.container import parse


@pytest.mark.parametrize("text", ["randomk:0.1", "randomk:0.1/shared", "randomk:0.1/auto/qsgd"])
def test_no_index_section_is_sent(text):
    dense = gauss(100_000)
    blob = grace_ext.compressor(text, 5).compress(dense, name="w", step=2, rank=1)
    parsed = parse(blob)
    assert parsed.index_id == Shared.id and parsed.k == 10_000 and parsed.index_section.size == 8
    assert np.array_equal(parsed.index_section.view("<u4"), Stream(5, "w", 2).shared().key())


def test_an_index_codec_that_is_asked_for_is_used():
    dense = gauss(100_000)
    blobs = {name: grace_ext.compressor(f"randomk:0.1/{name}/raw").compress(dense) for name in ("rice", "raw", "shared")}
    assert [parse(blob).index_id for blob in blobs.values()] == [3, 1, Shared.id]
    arrays = [grace_ext.decompress(blob, dense.size) for blob in blobs.values()]
    assert same_bits(arrays[0], arrays[1]) and same_bits(arrays[0], arrays[2])


def test_any_key_decodes_and_nothing_else():
    rng = np.random.default_rng(0)
    for d, k in ((1, 1), (2, 1), (4097, 4096), (2**31 - 1, 100), (200_000, 2000)):
        for payload in (np.zeros(8, np.uint8), np.full(8, 255, np.uint8), rng.integers(0, 256, 8).astype(np.uint8)):
            out = np.full(k, 0xFFFFFFFF, np.uint32)
            Shared.decode(read_only(payload), d, out)
            codec_conformance.check_support(out, d)
            assert out.tolist() == reference_sparse.draw_positions(k, d, *payload.view("<u4").tolist())
    for size in (0, 7, 9, 16):
        with pytest.raises(ContainerError, match="8 bytes"):
            Shared.decode(np.zeros(size, np.uint8), 10, np.empty(3, np.uint32))

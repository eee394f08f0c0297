"""Every index codec against what an index codec promises."""

import numpy as np
import pytest
from support import codec_conformance
from support.codec_conformance import variants

from grace_ext import registry
from grace_ext.pipeline import spec


@pytest.mark.parametrize("name", codec_conformance.supports())
@pytest.mark.parametrize("text", variants("index"))
def test_index_codec(text, name):
    codec_conformance.check_index_codec(spec.parse_stage("index", text), *codec_conformance.supports()[name])


@pytest.mark.parametrize(
    "text",
    [
        name
        for name in codec_conformance.index_codecs()
        if registry.lookup("index", name).lossless and name not in ("auto", "bitmap")
    ],
)
def test_index_codec_with_huge_d(text):
    """d = 2**31 - 1: nothing may depend on it in size, and no position may wrap. (A bitmap has d bits by definition.)"""
    indices = np.array([0, 5, 2**30, 2**31 - 3, 2**31 - 2], np.uint32)
    codec = spec.parse_stage("index", text)
    payload, support = codec.encode(indices, 2**31 - 1)
    out = np.empty(support.size, np.uint32)
    type(codec).decode(payload, 2**31 - 1, out)
    assert np.array_equal(out, support) and np.array_equal(support, indices)

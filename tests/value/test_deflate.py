"""Deflate with either library: the same promises, and each reads what the other wrote."""

import tracemalloc
import zlib

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss, same_bits

from grace_ext import ContainerError
from grace_ext.value import deflate

LIBRARIES = {"zlib": zlib}
try:
    from isal import isal_zlib

    LIBRARIES["isal"] = isal_zlib
except ImportError:
    pass


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    monkeypatch.setattr(deflate, "fast", LIBRARIES[request.param])


@pytest.mark.parametrize("level", [1, 2, 9])
def test_contract(library, level):
    for gradient in codec_conformance.gradients().values():
        if gradient.size:
            codec_conformance.check_value_codec(deflate.Deflate(level), gradient)


@pytest.mark.parametrize("reader", LIBRARIES)
@pytest.mark.parametrize("writer", LIBRARIES)
def test_one_writes_the_other_reads(monkeypatch, writer, reader):
    for gradient in codec_conformance.gradients().values():
        monkeypatch.setattr(deflate, "fast", LIBRARIES[writer])
        payload, _ = deflate.Deflate().encode(gradient, None)
        monkeypatch.setattr(deflate, "fast", LIBRARIES[reader])
        out = np.full_like(gradient, np.nan)
        deflate.Deflate.decode(payload, out)
        assert same_bits(out, gradient)


def test_a_stream_of_another_length(library):
    out = np.empty(1000, np.float32)
    for size, tail in ((3999, b""), (4001, b""), (0, b""), (4000, b"x"), (10**8, b"")):
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        payload = np.frombuffer(packer.compress(bytes(size)) + packer.flush() + tail, np.uint8)
        tracemalloc.start()
        with pytest.raises(ContainerError, match="the stream does not hold exactly 1000 values"):
            deflate.Deflate.decode(payload, out)
        assert tracemalloc.get_traced_memory()[1] < 200_000
        tracemalloc.stop()


def test_the_fast_library_is_used_if_there(monkeypatch):
    if "isal" not in LIBRARIES:
        pytest.skip("isal is not installed")
    assert deflate.fast is isal_zlib
    values = gauss(5000)
    payload = deflate.Deflate().encode(values, None)[0]
    monkeypatch.setattr(deflate, "fast", zlib)
    assert not np.array_equal(deflate.Deflate().encode(values, None)[0], payload)

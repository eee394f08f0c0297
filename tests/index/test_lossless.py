"""The lossless index codecs, one by one and by name: reference implementations, the second decoder, and their arrays' bounds."""

import numpy as np
import pytest
from support import codec_conformance, reference_decoder
from support.guards import survives
from support.position_inputs import FIXED, fits, inputs
from support.reference_kernels import index as reference_index

from grace_ext import registry
from grace_ext._util import scratch
from grace_ext.pipeline import spec

VARIANTS = [*FIXED, "huffman:bytes", "rice_adaptive:16", "rows", "rows:96", "rows:1", "row_context", "row_context:96"]


@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("text", ["auto", *VARIANTS])
def test_round_trip(text, name):
    indices, d = inputs()[name]
    if fits(text, d):
        codec_conformance.check_index_codec(spec.parse_stage("index", text), indices, d)


@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("text", VARIANTS)
def test_second_decoder(text, name):
    indices, d = inputs()[name]
    codec = spec.parse_stage("index", text)
    if fits(text, d):
        payload, _ = codec.encode(indices, d)
        assert list(reference_decoder.INDEX[codec.id](payload.tobytes(), d, indices.size)) == indices.tolist()


@pytest.mark.parametrize("name", inputs())
def test_reference_implementations(name):
    indices, d = inputs()[name]

    def encoded(codec):
        return registry.lookup("index", codec)().encode(indices, d)[0].tobytes()

    assert encoded("elias_fano") == reference_index.elias_fano(indices, d)
    assert encoded("huffman") == reference_index.huffman(indices)
    assert encoded("varint") == reference_index.varint(indices)
    rle = encoded("rle")
    assert rle == reference_index.rle(indices, list(rle[:2]))


def encode_inside(fence, text):
    """Every array that the codec makes ends at a forbidden page, and so do those that it is given."""
    codec = spec.parse_stage("index", text)
    kept = np.empty, np.zeros
    good = True
    for indices, d in [*codec_conformance.supports().values(), *inputs().values()]:
        if not fits(text, d) or indices.size > 3000:
            continue
        scratch._thread.arrays.clear()
        given, chosen = fence(indices), codec.choose(indices, d)
        np.empty = lambda size, dtype=float: fence(kept[1](size, dtype))
        np.zeros = np.empty
        payload, _ = chosen.encode(given, d)
        np.empty, np.zeros = kept
        fenced, out = fence(payload), fence(kept[1](indices.size, np.uint32))
        type(chosen).decode(fenced, d, out)
        good &= np.array_equal(out, indices)
        for bad in codec_conformance.mutations(payload, count=6):
            codec_conformance.refused_or(
                lambda bytes_, into, c=chosen, d=d: type(c).decode(bytes_, d, into), fence(bad), out
            )
    return good


@pytest.mark.parametrize("text", VARIANTS)
def test_stays_inside_its_arrays(text):
    assert encode_inside(np.copy, text)  # which also compiles what the child needs
    assert survives(encode_inside, text)


# auto

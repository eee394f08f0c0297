"""Compressors of every registered stage, in combination, against what a compressor promises."""

import subprocess
import sys

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss, same_bits
from support.codec_conformance import STOCHASTIC, specs

import grace_ext
from grace_ext import ContainerError
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.decoder import add_all, decode_sum


@pytest.mark.parametrize("text", specs())
def test_compressor(text):
    c = grace_ext.compressor(text, seed=3)
    for gradient in codec_conformance.gradients().values():
        blob, _ = codec_conformance.check_compressor(c, gradient)
        for copy in (grace_ext.compressor(str(c), seed=3), grace_ext.compressor(c.to_dict(), seed=3)):
            assert copy == c
            assert same_bits(copy.compress(gradient, name="weight", step=5, rank=1), blob)


@pytest.mark.parametrize("text", specs())
def test_large(text):
    codec_conformance.check_compressor(grace_ext.compressor(text), gauss(200_003))


@pytest.mark.parametrize("text", specs())
def test_feedback(text):
    c = grace_ext.compressor(text)
    for gradient in codec_conformance.gradients().values():
        codec_conformance.check_feedback(c, [gradient, gradient[::-1].copy(), np.float32(0.5) * gradient])
    bad = gauss(3000)
    bad[7] = np.nan
    codec_conformance.check_feedback(c, [bad, gauss(3000), bad, gauss(3000, 1)])


@pytest.mark.parametrize("text", specs())
def test_non_finite(text):
    """It reaches every receiver as NaN everywhere, so that no rank can miss it."""
    c = grace_ext.compressor(text)
    for special in (np.nan, np.inf, -np.inf):
        for d, at in ((1, 0), (17, 16), (3000, 0), (3000, 1500), (3000, 2999)):
            gradient = gauss(d)
            gradient[at] = special
            blob = c.compress(gradient)
            assert parse(blob, d).non_finite and blob.size <= 24
            assert np.isnan(grace_ext.decompress(blob, d)).all()
            for run in (
                lambda out, b=blob: grace_ext.decode_add(b, out, 0.5),
                lambda out, b=blob, n=d: decode_sum([parse(c.compress(gauss(n))), parse(b)], out),
            ):
                out = gauss(d)
                run(out)
                assert np.isnan(out).all()


@pytest.mark.parametrize("text", specs())
def test_bytes_depend_on_the_key_only(text):
    gradient = gauss(3000)

    def blob(seed=0, **key):
        return grace_ext.compressor(text, seed).compress(gradient, **key).tobytes()

    assert blob() == blob() == blob(name="", step=0, rank=0)
    others = [blob(seed=1), blob(name="w"), blob(step=1), blob(rank=1)]
    if text.startswith("randomk") and text.partition("/")[2].removeprefix("auto/") not in STOCHASTIC:
        assert blob() not in others[:3]
        return  # whether the rank plays a part is up to the value codec
    if text.partition("/")[2].removeprefix("auto/") in STOCHASTIC:
        assert blob() not in others
    if blob() in others:
        assert set(others) == {blob()}, "stochastic for a part of the key only"
    else:
        assert len(set(others)) == 4


def test_decode_sum_adds_in_the_order_of_the_list():
    """float32 addition is not associative: all ranks must do it in one order, whatever the codecs."""
    d, all_specs = 4099, specs()
    blobs = [grace_ext.compressor(text).compress(gauss(d, i), rank=i) for i, text in enumerate(all_specs)]
    sparse = [blob for blob in blobs if parse(blob).index_id]
    assert len(sparse) > 3 and len(blobs) > len(sparse)
    for chosen in (sparse, blobs, sparse[::-1], sparse[:1], []):
        for weight in (1.0, 1 / 3):
            expected = np.zeros(d, np.float32)
            for blob in chosen:
                expected += np.float32(weight) * grace_ext.decompress(blob, d)
            out = np.full(d, np.nan, np.float32)
            decode_sum([parse(blob, d) for blob in chosen], out, weight)
            assert same_bits(out, expected)


def test_add_all_adds_in_the_order_of_the_list_and_transforms_together():
    d = 4099
    blobs = [grace_ext.compressor(text).compress(gauss(d, i), rank=i) for i, text in enumerate(specs())]
    plain = [blob for blob in blobs if parse(blob).transform is None]
    assert 3 < len(plain) < len(blobs)
    start = gauss(d, 99)
    expected, out = start.copy(), start.copy()
    for blob in plain:
        expected += grace_ext.decompress(blob, d)
    add_all([parse(blob) for blob in plain], out)
    assert same_bits(out, expected)
    summed, out = np.empty_like(start), start.copy()
    decode_sum([parse(blob) for blob in blobs], summed)
    add_all([parse(blob) for blob in blobs], out)
    assert same_bits(out, start + summed)
    for wrong in (plain, blobs):
        with pytest.raises(ContainerError, match="4099 elements, 4098 were expected"):
            add_all([parse(blob) for blob in wrong], np.zeros(d - 1, np.float32))


def test_another_process_decodes_and_encodes_the_same(tmp_path):
    """Bytes suffice: the receiver has no object, option or hash seed of the sender's."""
    gradient, blobs = gauss(3000), []
    for text in specs():
        blobs.append(grace_ext.compressor(text, 9).compress(gradient, name="w", step=2, rank=3))
    np.savez(tmp_path / "blobs.npz", *blobs)
    decoder = (
        "import sys, numpy as np, grace_ext\n"
        "blobs = np.load(sys.argv[1])\n"
        "out = [grace_ext.decompress(blobs[key], 3000) for key in blobs.files]\n"
        "np.savez(sys.argv[2], *out)\n"
    )
    subprocess.run([sys.executable, "-c", decoder, tmp_path / "blobs.npz", tmp_path / "out.npz"], check=True)
    with np.load(tmp_path / "out.npz") as decoded:
        for key, blob in zip(decoded.files, blobs, strict=True):
            assert same_bits(decoded[key], grace_ext.decompress(blob, 3000))
    encoder = (
        "import sys, numpy as np, grace_ext\n"
        "from grace_ext.rng import Stream\n"
        "g = np.random.default_rng(0).standard_normal(3000).astype(np.float32)\n"
        "out = [grace_ext.compressor(t, 9).compress(g, name='w', step=2, rank=3) for t in sys.argv[2:]]\n"
        "np.savez(sys.argv[1], *out)\n"
    )
    subprocess.run([sys.executable, "-c", encoder, tmp_path / "again.npz", *specs()], check=True)
    with np.load(tmp_path / "again.npz") as again:
        assert [again[key].tobytes() for key in again.files] == [blob.tobytes() for blob in blobs]

"""Everything that is registered, by itself and in combination, against the checks of contract.py."""

import subprocess
import sys

import contract
import numpy as np
import pytest
import twins

import grace_ext
from grace_ext import ContainerError, registry
from grace_ext._util import scratch
from grace_ext._util.rng import Stream
from grace_ext.pipeline import spec
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.decoder import add_all, decode_sum

# Options to try besides the defaults; a part that is not listed is tried with its defaults.
OPTIONS = {
    ("index", "huffman"): ["huffman:bytes"],
    ("index", "rice_adaptive"): ["rice_adaptive:16", "rice_adaptive:4096"],
    ("index", "rows"): ["rows:1", "rows:7", "rows:2147483647"],
    ("transform", "dct"): ["dct:8", "dct:16:dims=1"],
    ("index", "bloom"): [
        "bloom:p1:fpr=0.01",
        "bloom:p2:fpr=0.01",
        "bloom:leftmost:fpr=0.1",
        "bloom:middle:fpr=0.5",
        "bloom:rightmost:fpr=1e-6",
        "bloom:naive:fpr=0.9:seed=7",
    ],
    ("sparsifier", "topk"): ["topk:0.1", "topk:1.0", "topk:0.1:per=tensor"],
    ("sparsifier", "randomk"): ["randomk:0.2", "randomk:1.0", "randomk:0.3:unbiased=true"],
    ("sparsifier", "threshold"): ["threshold:1.5"],
    ("sparsifier", "dgc"): ["dgc:0.1:sample=0.5"],
    ("value", "qsgd"): [
        "qsgd:2",
        "qsgd:7:bucket=8",
        "qsgd:8:bucket=32768",
        "qsgd:levels=1:norm=l2:bucket=8",
        "qsgd:levels=256:norm=l2",
        "qsgd:levels=32767",
        "qsgd:levels=5:entropy=huffman",
        "qsgd:norm=l2:entropy=ans",
    ],
    ("value", "sketchml"): ["sketchml:5:entropy=ans", "sketchml:256:entropy=huffman"],
    ("value", "lloyd"): ["lloyd:0.01:entropy=huffman", "lloyd:0.3", "lloyd:0.1:entropy=none"],
    ("value", "deflate"): ["deflate:6"],
    ("value", "polyfit"): ["polyfit:1:segments=20", "polyfit:0:segments=1"],
    ("value", "minmax"): ["minmax:4:chunk=100:entropy=ans"],
    ("value", "natural"): ["natural:8:entropy=huffman"],
    ("value", "onebit"): ["onebit:0"],
    ("value", "terngrad"): ["terngrad:ans:bucket=64"],
    ("value", "threelc"): ["threelc:1.1"],
}
# cosine(what receivers get, true top-k) of a normal gradient; 0.5 where nothing is known: a mix-up gives about 0.
COSINE = {
    "raw": 1,
    "deflate": 1,
    "deflate:6": 1,
    "fp16": 1 - 1e-6,
    "qsgd": 1 - 1e-4,
    "qsgd:7:bucket=8": 1 - 1e-3,
    "qsgd:8:bucket=32768": 1 - 1e-3,
    "dexp": 1 - 1e-3,
    "sketchml": 0.995,
    "sketchml:5:entropy=ans": 0.9,
    "sketchml:256:entropy=huffman": 0.999,
    "lloyd": 1 - 1.3e-3,
    "lloyd:0.01:entropy=huffman": 1 - 1e-4,
    "polyfit": 1 - 1e-4,
    "polyfit:1:segments=20": 1 - 1e-4,
    "bf16": 1 - 1e-5,
    "minmax": 1 - 1e-4,
    "minmax:4:chunk=100:entropy=ans": 0.98,
    "natural": 0.9,
    "natural:8:entropy=huffman": 0.9,
    "onebit": 0.9,
    "onebit:0": 0.9,
    "terngrad": 0.6,
    "terngrad:ans:bucket=64": 0.65,
}
STOCHASTIC = {
    "qsgd",
    *OPTIONS["value", "qsgd"],
    "natural",
    *OPTIONS["value", "natural"],
    "terngrad",
    *OPTIONS["value", "terngrad"],
}


def variants(kind):
    names = contract.index_codecs() if kind == "index" else registry.names(kind)
    return [text for name in names for text in (name, *OPTIONS.get((kind, name), []))]


def specs():
    """Every part at least once with the default others, and each index codec with some of the value codecs."""
    index, value = contract.index_codecs(), variants("value")
    pairs = [(i, "raw") for i in index] + [("auto", v) for v in value]
    pairs += [(index[n % len(index)], v) for n, v in enumerate(value)]
    found = [f"topk:0.1/{i}/{v}" for i, v in pairs] + [f"{s}/auto/raw" for s in variants("sparsifier")]
    found += [f"dense/{v}" for v in value]
    roads = ("topk:0.1/auto/raw", "topk:0.1:per=chunk/rice/qsgd", "dense/raw")
    found += [f"{transform}/{road}" for transform in variants("transform") for road in roads]
    found += ["randomk:0.1/rice/qsgd:7", "randomk:0.1/shared/fp16", "randomk:0.1:unbiased=true/shared/qsgd"]
    return sorted(set(found))


@pytest.mark.parametrize("name", contract.supports())
@pytest.mark.parametrize("text", variants("index"))
def test_index_codec(text, name):
    contract.check_index_codec(spec.parse_stage("index", text), *contract.supports()[name])


@pytest.mark.parametrize(
    "text",
    [name for name in contract.index_codecs() if registry.lookup("index", name).lossless and name not in ("auto", "bitmap")],
)
def test_index_codec_with_huge_d(text):
    """d = 2**31 - 1: nothing may depend on it in size, and no position may wrap. (A bitmap has d bits by definition.)"""
    indices = np.array([0, 5, 2**30, 2**31 - 3, 2**31 - 2], np.uint32)
    codec = spec.parse_stage("index", text)
    payload, support = codec.encode(indices, 2**31 - 1)
    out = np.empty(support.size, np.uint32)
    type(codec).decode(payload, 2**31 - 1, out)
    assert np.array_equal(out, support) and np.array_equal(support, indices)


@pytest.mark.parametrize("text", variants("value"))
def test_value_codec(text):
    codec = spec.parse_stage("value", text)
    for name, gradient in contract.gradients().items():
        if gradient.size:
            decoded = contract.check_value_codec(codec, gradient)
            assert gradient.any() or not decoded.any(), f"{name}: something out of nothing"


@pytest.mark.parametrize("text", variants("sparsifier"))
def test_sparsifier(text):
    sparsifier = spec.parse_stage("sparsifier", text)
    for gradient in contract.gradients().values():
        contract.check_sparsifier(sparsifier, gradient)


@pytest.mark.parametrize("density", [1e-9, 0.001, 0.01, 0.3, 1.0])
def test_topk_is_the_true_top_k(density):
    sparsifier = registry.build("sparsifier", "topk", {"density": density})
    for gradient in [*contract.gradients().values(), contract.gauss(300_000)]:
        k = min(gradient.size, max(1, round(density * gradient.size)))
        assert np.array_equal(sparsifier.select(gradient, contract.scope_of(gradient))[0], twins.topk(gradient, k))


@pytest.mark.parametrize("text", specs())
def test_compressor(text):
    c = grace_ext.compressor(text, seed=3)
    for gradient in contract.gradients().values():
        blob, _ = contract.check_compressor(c, gradient)
        for copy in (grace_ext.compressor(str(c), seed=3), grace_ext.compressor(c.to_dict(), seed=3)):
            assert copy == c
            assert contract.same_bits(copy.compress(gradient, name="weight", step=5, rank=1), blob)


@pytest.mark.parametrize("text", specs())
def test_large(text):
    contract.check_compressor(grace_ext.compressor(text), contract.gauss(200_003))


@pytest.mark.parametrize("text", specs())
def test_feedback(text):
    c = grace_ext.compressor(text)
    for gradient in contract.gradients().values():
        contract.check_feedback(c, [gradient, gradient[::-1].copy(), np.float32(0.5) * gradient])
    bad = contract.gauss(3000)
    bad[7] = np.nan
    contract.check_feedback(c, [bad, contract.gauss(3000), bad, contract.gauss(3000, 1)])


@pytest.mark.parametrize("text", specs())
def test_non_finite(text):
    """It reaches every receiver as NaN everywhere, so that no rank can miss it."""
    c = grace_ext.compressor(text)
    for special in (np.nan, np.inf, -np.inf):
        for d, at in ((1, 0), (17, 16), (3000, 0), (3000, 1500), (3000, 2999)):
            gradient = contract.gauss(d)
            gradient[at] = special
            blob = c.compress(gradient)
            assert parse(blob, d).non_finite and blob.size <= 24
            assert np.isnan(grace_ext.decompress(blob, d)).all()
            for run in (
                lambda out, b=blob: grace_ext.decode_add(b, out, 0.5),
                lambda out, b=blob, n=d: decode_sum([parse(c.compress(contract.gauss(n))), parse(b)], out),
            ):
                out = contract.gauss(d)
                run(out)
                assert np.isnan(out).all()


@pytest.mark.parametrize("text", specs())
def test_bytes_depend_on_the_key_only(text):
    gradient = contract.gauss(3000)

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


@pytest.mark.parametrize("text", variants("value"))
def test_cosine_with_the_true_top_k(text):
    """Trap 1: values in one order and positions in another make a gradient that is noise."""
    for d, density in ((5000, 0.1), (200_000, 0.01)):
        gradient = contract.gauss(d, 4)
        true = np.zeros(d)
        chosen = twins.topk(gradient, round(density * d))
        true[chosen] = gradient[chosen]
        for index in contract.index_codecs():
            c = grace_ext.compressor(f"topk:{density}/{index}/{text}")
            decoded = grace_ext.decompress(c.compress(gradient), d).astype(float)
            cosine = decoded @ true / np.linalg.norm(decoded) / np.linalg.norm(true)
            assert cosine >= (COSINE.get(text, 0.5) if c.index.lossless else 0.5) - 1e-12


def test_decode_sum_adds_in_the_order_of_the_list():
    """float32 addition is not associative: all ranks must do it in one order, whatever the codecs."""
    d, all_specs = 4099, specs()
    blobs = [grace_ext.compressor(text).compress(contract.gauss(d, i), rank=i) for i, text in enumerate(all_specs)]
    sparse = [blob for blob in blobs if parse(blob).index_id]
    assert len(sparse) > 3 and len(blobs) > len(sparse)
    for chosen in (sparse, blobs, sparse[::-1], sparse[:1], []):
        for weight in (1.0, 1 / 3):
            expected = np.zeros(d, np.float32)
            for blob in chosen:
                expected += np.float32(weight) * grace_ext.decompress(blob, d)
            out = np.full(d, np.nan, np.float32)
            decode_sum([parse(blob, d) for blob in chosen], out, weight)
            assert contract.same_bits(out, expected)


def test_add_all_adds_in_the_order_of_the_list_and_transforms_together():
    d = 4099
    blobs = [grace_ext.compressor(text).compress(contract.gauss(d, i), rank=i) for i, text in enumerate(specs())]
    plain = [blob for blob in blobs if parse(blob).transform is None]
    assert 3 < len(plain) < len(blobs)
    start = contract.gauss(d, 99)
    expected, out = start.copy(), start.copy()
    for blob in plain:
        expected += grace_ext.decompress(blob, d)
    add_all([parse(blob) for blob in plain], out)
    assert contract.same_bits(out, expected)
    summed, out = np.empty_like(start), start.copy()
    decode_sum([parse(blob) for blob in blobs], summed)
    add_all([parse(blob) for blob in blobs], out)
    assert contract.same_bits(out, start + summed)
    for wrong in (plain, blobs):
        with pytest.raises(ContainerError, match="4099 elements, 4098 were expected"):
            add_all([parse(blob) for blob in wrong], np.zeros(d - 1, np.float32))


def test_another_process_decodes_and_encodes_the_same(tmp_path):
    """Bytes suffice: the receiver has no object, option or hash seed of the sender's."""
    gradient, blobs = contract.gauss(3000), []
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
            assert contract.same_bits(decoded[key], grace_ext.decompress(blob, 3000))
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


def test_scratch_arrays_do_not_leak_between_calls():
    """Encoded and decoded arrays may lie in scratch arrays; what compress and decompress return may not."""
    c = grace_ext.compressor("topk:0.1/rice/qsgd")
    blob = c.compress(contract.gauss(5000))
    dense, kept = grace_ext.decompress(blob, 5000), blob.copy()
    expected = dense.copy()
    for text in specs():
        other = grace_ext.compressor(text)
        grace_ext.decompress(other.compress(contract.gauss(6000, 2)), 6000)
        other.encode(contract.gauss(7000, 3), Stream())
    assert contract.same_bits(blob, kept) and contract.same_bits(dense, expected)


def test_a_scratch_array_of_another_dtype_is_another_one():
    ints = scratch.scratch("a test's", np.uint32, 5)
    floats = scratch.scratch("a test's", np.float64, 5)
    assert ints.dtype == np.uint32 and floats.dtype == np.float64 and not np.shares_memory(ints, floats)

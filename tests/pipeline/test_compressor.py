"""What goes into a compressor and what decoders write to: dtypes, shapes, views, and what is refused."""

import math

import ml_dtypes
import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss, read_only, same_bits

import grace_ext
from grace_ext import ConfigError
from grace_ext._util.rng import Stream
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.decoder import decode_sum


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("text", ["topk:0.1/rice/raw", "dense/raw"])
def test_dtypes(text, dtype):
    gradient = gauss(600).astype(dtype)
    blob = grace_ext.compressor(text).compress(gradient)
    assert parse(blob).dtype == np.dtype(dtype).name
    assert same_bits(
        grace_ext.decompress(blob, 600),
        grace_ext.decompress(grace_ext.compressor(text).compress(gradient.astype(np.float32)), 600),
    )


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "complex64", "longdouble", "object", "U4"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="a gradient is one of float32, float16, bfloat16, float64, not"):
        grace_ext.compressor("dense").compress(np.ones(4, dtype))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (6, 100), (2, 3, 100), (0, 5)])
def test_shapes(shape):
    gradient = gauss(int(np.prod(shape))).reshape(shape)
    for text in ("topk:0.1", "dense/fp16"):
        c = grace_ext.compressor(text)
        plain, shaped = c.compress(gradient), c.compress(gradient, shape=True)
        assert parse(plain).shape is None and parse(shaped).shape == shape
        assert plain.tobytes() == c.compress(gradient.reshape(-1)).tobytes()
        assert same_bits(grace_ext.decompress(plain, gradient.size), grace_ext.decompress(shaped, gradient.size))


@pytest.mark.parametrize("text", ["topk:0.1/rice/qsgd", "dense/qsgd"])
def test_views_lists_and_foreign_byte_order(text):
    c, gradient = grace_ext.compressor(text), gauss(600)
    expected = c.compress(gradient).tobytes()
    unaligned = np.frombuffer(b"x" + gradient.tobytes(), np.float32, offset=1)
    matrix = np.asfortranarray(gradient.reshape(20, 30))
    for same in (np.repeat(gradient, 2)[::2], gradient.astype(">f4"), unaligned, matrix, memoryview(gradient)):
        assert c.compress(same).tobytes() == expected
    assert parse(c.compress([1.0, 2.0])).dtype == "float64"


def test_a_float64_beyond_float32_is_non_finite():
    for value in (1e39, -1e300):
        blob = grace_ext.compressor("topk").compress(np.array([0.0, value]))
        assert parse(blob).non_finite and parse(blob).dtype == "float64"


def test_the_input_is_not_changed():
    gradient = gauss(5000)
    kept = gradient.copy()
    for text in ("topk:0.1/rice/qsgd", "dense/qsgd", "dense/fp16", "dense"):
        blob = grace_ext.compressor(text).compress(gradient)
        dense = grace_ext.decompress(blob, 5000)
        dense[:] = 7
        assert same_bits(gradient, kept)
        assert not (grace_ext.decompress(blob, 5000) == 7).any(), "the container is a view of something"


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(8, np.float64),
        np.zeros((2, 4), np.float32),
        np.zeros(16, np.float32)[::2],
        read_only(np.zeros(8, np.float32)),
        [0.0] * 8,
        None,
        np.float32(0),
    ],
    ids=["float64", "2-D", "strided", "read-only", "list", "None", "scalar"],
)
def test_accumulators_that_are_refused(wrong):
    blob = grace_ext.compressor("topk:0.5").compress(gauss(8))
    for run in (lambda: grace_ext.decode_add(blob, wrong), lambda: decode_sum([parse(blob)], wrong)):
        with pytest.raises(ConfigError, match="the accumulator must be a writable, contiguous float32"):
            run()


@pytest.mark.parametrize("spec", ["topk:0.1/rice/raw", "topk:0.1/rice/qsgd:7"])
@pytest.mark.parametrize(
    "wrong", [{"step": 1.5}, {"step": 2**63}, {"rank": None}, {"rank": "3"}, {"name": None}, {"name": b"a"}], ids=str
)
def test_names_and_numbers_that_are_refused(spec, wrong):
    """Also where the spec draws no random numbers."""
    [(option, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"{option}={value!r}; allowed: "):
        grace_ext.compressor(spec).compress(gauss(8), **wrong)


@pytest.mark.parametrize("spec", ["topk:0.1", "powersgd:2"])
def test_seeds(spec):
    for wrong in (1.5, "3", None, np.nan, np.inf, 2**63):
        with pytest.raises(ConfigError, match="seed=.*; allowed: integers of 64 bits"):
            grace_ext.compressor(spec, seed=wrong)
    assert grace_ext.compressor(spec, seed=np.int64(5)) == grace_ext.compressor(spec, seed=5)


def test_numpys_integers_are_numbers():
    c, gradient = grace_ext.compressor("topk:0.1/rice/qsgd:7"), gauss(1000)
    assert same_bits(c.compress(gradient, step=np.int32(7), rank=np.uint8(2)), c.compress(gradient, step=7, rank=2))


def test_encoded_tells_what_the_container_holds():
    gradient = gauss(1000)
    encoded = grace_ext.compressor("topk:0.1/rice/qsgd").encode(gradient, Stream())
    parsed = parse(encoded.blob)
    assert (encoded.index_bytes, encoded.value_bytes) == (parsed.index_section.size, parsed.value_section.size)
    assert {"select", "index", "value", "container"} <= set(encoded.seconds)
    assert all(0 <= seconds < math.inf for seconds in encoded.seconds.values())
    assert not encoded.non_finite
    gradient[5] = np.inf
    encoded = grace_ext.compressor("topk:0.1/rice/qsgd").encode(gradient, Stream())
    assert encoded.non_finite and encoded.support is encoded.values is encoded.decoded is None
    assert encoded.index_bytes == encoded.value_bytes == 0


def test_auto_is_never_longer_than_any_fixed_lossless_codec():
    for name, (indices, d) in codec_conformance.supports().items():
        gradient = np.zeros(d, np.float32)
        gradient[indices] = 1
        sizes = [grace_ext.compressor(f"topk:1.0/{codec}").compress(gradient).size for codec in ("raw", "bitmap", "rice")]
        assert grace_ext.compressor("topk:1.0/auto").compress(gradient).size <= min(sizes), name


def test_rice_is_near_the_entropy_of_a_random_support():
    """design.md: 8.12 bits at 1 %, where log2 C(d, k) / k is 8.08."""
    encoded = grace_ext.compressor("topk:0.01/rice").encode(gauss(1_000_000), Stream())
    assert 8.0 < 8 * encoded.index_bytes / encoded.support.size < 8.15


def test_repr():
    c = grace_ext.compressor("topk:0.02/qsgd:7", seed=5)
    assert repr(c) == "grace_ext.compressor('topk:0.02/auto/qsgd:7', seed=5)"
    assert eval(repr(c)) == c


@pytest.mark.parametrize("spec", ["topk:0.1", "dense/qsgd", "dct:32/topk:0.1"])
def test_a_shape_is_stored_with_error_feedback_too(spec):
    one, state = gauss(100), (np.zeros(100, np.float32), np.empty(100, np.float32))
    blob = grace_ext.compressor(spec).encode(one, Stream(), state=state, shape=(4, 25)).blob
    assert grace_ext.inspect(blob).shape == (4, 25)
    assert same_bits(blob, grace_ext.compressor(spec).encode(one, Stream(), shape=(4, 25)).blob)


def test_sizes_of_the_tensors_must_sum_up():
    c, one = grace_ext.compressor("topk:0.1"), gauss(100)
    blob = c.encode(one, Stream()).blob
    assert same_bits(c.encode(one, Stream(), sizes=(30, 70)).blob, blob)
    for run in (c.encode, lambda *args, **sizes: c.encode_compensated(one, one, one.copy(), *args[1:], **sizes)):
        with pytest.raises(ConfigError, match="99 elements, the gradient 100"):
            run(one, Stream(), sizes=(30, 69))

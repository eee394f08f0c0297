"""Random inputs: what is encoded decodes, and any byte string either decodes or raises ContainerError."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp
from support import codec_conformance, container_builder
from support.arrays import gauss

import grace_ext
from grace_ext import ContainerError, kernels, registry
from grace_ext.pipeline.container import parse, split
from grace_ext.pipeline.decoder import decode_sum

SPECS = codec_conformance.specs()
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
sizes = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 511, 512, 513, 4095, 4097]))
# Few distinct values (ties, zeros) or any floats; hypothesis fills most of a large array with one value.
arrays = sizes.flatmap(
    lambda d: st.one_of(
        stnp.arrays(np.float32, d, elements=finite),
        stnp.arrays(np.float32, d, elements=st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1.0, 1e-45])),
        st.integers(0, 2**32 - 1).map(lambda seed: gauss(d, seed)),
    )
)
densities = st.floats(1e-6, 1.0)


@pytest.mark.parametrize("text", SPECS)
@given(gradient=arrays)
def test_round_trip(text, gradient):
    codec_conformance.check_compressor(grace_ext.compressor(text), gradient)


@given(
    gradient=arrays,
    density=densities,
    index=st.sampled_from(codec_conformance.index_codecs()),
    value=st.sampled_from(registry.names("value")),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=200)
def test_round_trip_of_any_combination(gradient, density, index, value, seed):
    c = grace_ext.compressor({"sparsifier": {"name": "topk", "density": density}, "index": index, "value": value}, seed)
    assert grace_ext.compressor(str(c), seed) == c
    codec_conformance.check_compressor(c, gradient)


@given(
    steps=st.integers(1, 600).flatmap(
        lambda d: st.lists(stnp.arrays(np.float32, d, elements=finite), min_size=1, max_size=3)
    ),
    text=st.sampled_from(SPECS),
)
@settings(max_examples=150)
def test_feedback(steps, text):
    codec_conformance.check_feedback(grace_ext.compressor(text), steps)


@pytest.mark.parametrize("name", codec_conformance.index_codecs())
@given(data=st.data())
def test_index_codecs(name, data):
    d = data.draw(st.integers(1, 2000))
    indices = data.draw(st.sets(st.integers(0, d - 1), min_size=1).map(sorted))
    codec_conformance.check_index_codec(registry.build("index", name), np.array(indices, np.uint32), d)


# Hostile bytes


def try_all(blob, size):
    """Every way to read a container ends well or with ContainerError. Returns whether it could be read."""
    try:
        dense = grace_ext.decompress(blob, size)
    except ContainerError:
        dense = None
    else:
        assert dense.dtype == np.float32 and dense.shape == (size,)
    accumulator = np.ones(size, np.float32)
    try:
        with np.errstate(over="ignore"):
            grace_ext.decode_add(blob, accumulator)
        assert dense is not None
        with np.errstate(over="ignore", invalid="ignore"):
            assert np.array_equal(accumulator, 1 + dense, equal_nan=True)
    except ContainerError:
        assert dense is None and (accumulator == 1).all()
    try:
        decode_sum([parse(blob, size)] * 2, np.empty(size, np.float32))
        assert dense is not None
    except ContainerError:
        assert dense is None
    try:
        split(blob, 2, size)
    except ContainerError:
        pass
    return dense is not None


def check_peak(limit, function, *args):
    """The peak, which is below the limit. What other threads of this process allocate meanwhile is in it, so one that is not
    has to repeat itself."""
    peaks = []
    while not peaks or peaks[-1] >= limit:
        assert len(peaks) < 3, peaks
        peaks.append(codec_conformance.peak_of(ContainerError, function, *args))
    return peaks[-1]


@given(blob=st.binary(max_size=200), size=st.integers(0, 300))
@settings(max_examples=300)
def test_arbitrary_bytes(blob, size):
    assert not try_all(blob, size)


number = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=6))
section = st.one_of(
    st.binary(max_size=60), st.lists(st.integers(0, 40), max_size=12).map(lambda n: container_builder.u32(*sorted(n)))
)


@given(
    fields=st.fixed_dictionaries(
        {"d": st.integers(0, 40), "index": st.integers(0, 14), "value": st.integers(0, 15)},
        optional={
            "flags": st.integers(0, 255),
            "k": number,
            "index_length": number,
            "value_length": number,
            "shape": st.lists(number, max_size=3),
            "index_section": section,
            "value_section": section,
            "order_section": st.binary(max_size=8),
            "transform": st.binary(max_size=4),
        },
    )
)
@settings(max_examples=500)
def test_forged_headers(fields):
    """Everything is well sealed and nothing need fit."""
    try_all(container_builder.container(**fields), fields["d"])


@pytest.mark.parametrize("text", SPECS)
@given(data=st.data())
@settings(max_examples=40)
def test_mutated_containers(text, data):
    """Bytes changed, cut out or put in, under a checksum that fits: deeper checks must hold, in bounded memory."""
    d = data.draw(st.sampled_from([1, 9, 40, 300]))
    blob = grace_ext.compressor(text).compress(np.round(gauss(d, data.draw(st.integers(0, 5))), 1))
    body = bytearray(blob.tobytes()[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1) | st.integers(0, min(len(body), 24) - 1)) if body else 0
        change = data.draw(st.sampled_from(["set", "flip", "cut", "insert"]))
        if change == "set" and body:
            body[at] = data.draw(st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255))
        elif change == "flip" and body:
            body[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del body[at : at + data.draw(st.integers(1, 4))]
        else:
            body[at:at] = data.draw(st.binary(min_size=1, max_size=4))
    mutated = container_builder.seal(bytes(body))
    try_all(mutated, d)
    try_all(mutated, d + 1)


def test_memory_is_bounded_by_the_expected_size():
    """A few hundred bytes must not cost more than a few times the dense gradient, whatever they claim."""
    kernels.warmup()  # what their loading takes is not the containers' doing
    d = 100_000
    rng = np.random.default_rng(0)
    claims = []
    for value in range(1, 16):
        for index in range(14):
            for k in (1, 1000, d):
                for size in (0, 1, 60, 500):
                    junk = rng.integers(0, 256, size, np.uint8).tobytes()
                    claims.append(
                        container_builder.container(
                            d=d, index=index, value=value, k=k, index_section=junk[: size // 2], value_section=junk
                        )
                    )
    bomb = zlib.compressobj(9, 8, -15)
    bomb = bomb.compress(bytes(50_000_000)) + bomb.flush()
    claims.append(container_builder.container(d=d, index=0, value=4, value_section=bomb))
    claims.append(
        container_builder.container(
            d=d,
            flags=container_builder.ORDER,
            index=0,
            value=2,
            value_section=bytes(2 * d),
            order_section=bytes(17 * d // 8),
        )
    )
    for blob in claims:
        check_peak(8 * 4 * d + 200_000, grace_ext.decompress, blob, d)


@pytest.mark.parametrize("text", SPECS)
def test_memory_of_valid_containers(text):
    d = 100_000
    blob = grace_ext.compressor(text).compress(gauss(d))
    assert 4 * d <= check_peak(6 * 4 * d + 200_000, grace_ext.decompress, blob, d)
    accumulator = np.zeros(d, np.float32)
    sparse = parse(blob).k < d / 5
    check_peak((2 if sparse else 6) * 4 * d + 200_000, grace_ext.decode_add, blob, accumulator)

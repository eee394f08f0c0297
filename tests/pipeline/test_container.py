"""The wire format. Each way to be malformed has its own message, and its own test here."""

import numpy as np
import pytest
from support import codec_conformance, container_builder, reference_decoder
from support.arrays import gauss, same_bits
from support.codec_conformance import refused
from support.container_builder import NON_FINITE, ORDER, SHAPE, TRANSFORM, reseal, u32, varint

import grace_ext
from grace_ext import ConfigError, ContainerError
from grace_ext.pipeline import container
from grace_ext.pipeline.decoder import decode_rows, decode_sum


def test_the_forged_container_is_valid():
    """All tests below break one thing in it."""
    assert grace_ext.decompress(container_builder.container(), 8).tolist() == [0, 1, 0, 0, 2, 0, 0, 3]
    assert grace_ext.decompress(container_builder.container(flags=ORDER, order_section=bytes([0b100001])), 8).tolist() == [
        0,
        2,
        0,
        0,
        1,
        0,
        0,
        3,
    ]
    assert grace_ext.decompress(container_builder.container(flags=SHAPE, shape=(2, 2, 2)), 8).tolist() == [
        0,
        1,
        0,
        0,
        2,
        0,
        0,
        3,
    ]
    assert np.isnan(grace_ext.decompress(container_builder.container(flags=NON_FINITE, index=0, value=0), 8)).all()
    assert grace_ext.decompress(container_builder.container(index=0, d=3), 3).tolist() == [1, 2, 3]
    assert (
        grace_ext.decompress(container_builder.container(k=0, index_section=b"", value_section=b""), 8).tolist() == [0] * 8
    )


def test_pack_writes_what_the_document_says():
    gradient = np.array([0, 1, 0, 0, 2, 0, 0, 3], np.float32)
    c = grace_ext.compressor("topk:1.0/raw/raw")
    assert c.compress(gradient).tobytes() == container_builder.container()
    assert c.compress(gradient.reshape(2, 4), shape=True).tobytes() == container_builder.container(flags=SHAPE, shape=(2, 4))
    assert c.compress(gradient.astype(np.float16)).tobytes() == container_builder.container(flags=1)
    assert c.compress(gradient * np.nan).tobytes() == container_builder.container(flags=NON_FINITE, index=0, value=0)
    dense = grace_ext.compressor("dense").compress(gradient)
    assert dense.tobytes() == container_builder.container(index=0, value_section=gradient.tobytes())


@pytest.mark.parametrize("text", codec_conformance.specs())
def test_the_reference_decoder_agrees(text):
    c = grace_ext.compressor(text)
    for name, gradient in codec_conformance.gradients().items():
        if gradient.size > 5000:
            continue
        blob = c.compress(gradient)
        parsed = container.parse(blob)
        if parsed.index_id not in (0, *reference_decoder.INDEX) or parsed.value_id not in reference_decoder.VALUE:
            pytest.skip("a codec that the reference decoder does not know")
        dense, fields = reference_decoder.decode(blob)
        assert same_bits(np.array(dense, np.float32), grace_ext.decompress(blob, gradient.size)), name
        assert (fields["d"], fields["k"], fields["dtype"]) == (parsed.d, parsed.k, parsed.dtype)


# The header


@pytest.mark.parametrize(
    "field, bytes_",
    [
        ("magic", b""),
        ("version", b"\x47"),
        ("flags", b"\x47\xe1"),
        ("index codec", b"\x47\xe1\0"),
        ("value codec", b"\x47\xe1\0\1"),
        ("d", b"\x47\xe1\0\1\1"),
        ("d", b"\x47\xe1\0\1\1\x80"),
        ("k", b"\x47\xe1\0\1\1\x08"),
        ("index length", b"\x47\xe1\0\1\1\x08\3"),
        ("value length", b"\x47\xe1\0\1\1\x08\3\x0c"),
        ("value length", b"\x47\xe1\0\0\1\x08"),
    ],
)
def test_ends_within_the_header(field, bytes_):
    refused(f"the buffer ends before the {field}$" if field not in "dk" else f"the buffer ends before {field}$", bytes_)


@pytest.mark.parametrize("length", range(1, len(container_builder.container())))
def test_every_truncation(length):
    refused(None, container_builder.container()[:length])


def test_wrong_magic():
    refused("not a container", container_builder.container(magic=0x48))
    refused("not a container", container_builder.container(version=0xD1))


@pytest.mark.parametrize("version", [0, 2, 15])
def test_unknown_version(version):
    refused(f"version {version} is not known", container_builder.container(version=0xE0 | version))


@pytest.mark.parametrize("code", range(4, 16))
def test_unknown_dtype(code):
    refused(f"dtype code {code} is not known", container_builder.container(flags=code))


def test_unknown_codecs():
    refused("index codec 255 is not known", container_builder.container(index=255))
    refused("value codec 255 is not known", container_builder.container(value=255))
    refused(
        "index codec 255 is not known", container_builder.container(index=255, k=0, index_section=b"", value_section=b"")
    )


def test_missing_value_codec():
    refused("the value codec is missing", container_builder.container(value=0))


def test_unknown_transform():
    refused("transform 9 is not known", container_builder.container(flags=TRANSFORM, transform=b"\x09\0"))
    refused("the buffer ends before the transform", container_builder.container(flags=TRANSFORM)[:6])


def test_malformed_transform():
    for parameters in (b"\x06", b"\x00\x02", b"\x09\x01", b"\x06\x03", b"\x06\x02\x00"):
        refused(
            "dct: the parameters are missing",
            container_builder.container(flags=TRANSFORM, transform=bytes((1, len(parameters))) + parameters),
        )
    refused(
        "17 bytes of transform parameters", container_builder.container(flags=TRANSFORM, transform=b"\x01\x11" + bytes(17))
    )


@pytest.mark.parametrize(
    "broken",
    [
        {"index": 1},
        {"value": 1},
        {"flags": NON_FINITE | ORDER},
        {"flags": NON_FINITE | TRANSFORM, "transform": b"\x01\x02\x06\x02"},
    ],
)
def test_non_finite_with_reserved_parts(broken):
    fields = {"flags": NON_FINITE, "index": 0, "value": 0, **broken}
    refused("a non-finite container has no codecs, no order and no transform", container_builder.container(**fields))


@pytest.mark.parametrize(
    "bytes_", [b"\x88\x00", b"\x88\x80\x00", b"\x80\x80\x80\x80\x10", b"\x80\x80\x80\x80\x80\x01", b"\xff\xff\xff\xff\xff"]
)
@pytest.mark.parametrize("field", ["d", "k", "index_length", "value_length", "shape"])
def test_varint_not_in_its_shortest_form_or_too_large(field, bytes_):
    fields = {"flags": SHAPE, "shape": (bytes_,)} if field == "shape" else {field: bytes_}
    refused("is not a varint below 2..32 in its shortest form", container_builder.container(**fields))


def test_d_beyond_the_version():
    refused("d = 2147483648 is beyond", container_builder.container(d=2**31), size=8)
    assert container.parse(container_builder.container(d=2**31 - 1)).d == 2**31 - 1


def test_another_size_than_expected():
    for size in (0, 7, 9):
        refused(f"holds 8 elements, {size} were expected", container_builder.container(), size)


def test_k_beyond_d():
    refused("k = 9 is more than the 8 elements that there are", container_builder.container(k=9))


def test_shape_of_another_product():
    for shape in ((), (7,), (2, 2), (0, 8), (8, 2)):
        refused("does not have 8 elements", container_builder.container(flags=SHAPE, shape=shape))


def test_too_many_dimensions():
    assert container.parse(container_builder.container(flags=SHAPE, shape=(8, *[1] * 31))).shape == (8, *[1] * 31)
    refused("33 dimensions, 32 at most", container_builder.container(flags=SHAPE, shape=(8, *[1] * 32)))
    with pytest.raises(ConfigError, match="at most 32 dimensions"):
        container.pack(1, 1, 0, np.empty(0, np.uint8), 1, np.zeros(4, np.uint8), shape=(1,) * 33)


# Lengths and the checksum


def test_sections_longer_than_the_buffer():
    refused("the sections need .* bytes, the buffer has", container_builder.container(index_length=2**32 - 1))
    refused("the sections need .* bytes, the buffer has", container_builder.container(value_length=13))
    refused("the sections need .* bytes, the buffer has", container_builder.container(flags=ORDER))
    refused("the sections need .* bytes, the buffer has", container_builder.container(flags=ORDER, k=8, order_section=b"12"))


def test_trailing_bytes():
    refused("1 bytes follow the container", container_builder.container() + b"\0")
    refused("4 bytes follow the container", container_builder.container(value_length=8))


def test_checksum():
    good = container_builder.container()
    for at in range(len(good)):
        for bit in (0, 7):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            refused(None, bytes(bad))
    refused("the checksum does not match", good[:-4] + u32(0))
    refused("the checksum does not match", good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])


# Buffers


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda b: np.frombuffer(b, np.uint8),
        lambda b: np.frombuffer(b"x" + b, np.uint8)[1:],
        lambda b: np.repeat(np.frombuffer(b, np.uint8), 2)[::2],
    ],
)
def test_any_buffer_of_bytes(make):
    blob = grace_ext.compressor("topk:0.1/rice/qsgd").compress(gauss(1000))
    assert same_bits(grace_ext.decompress(make(blob.tobytes()), 1000), grace_ext.decompress(blob, 1000))


@pytest.mark.parametrize("wrong", [None, 5, "text", [71, 225], np.zeros(4, np.float32), np.zeros((4, 4), np.uint8)])
def test_not_a_buffer_of_bytes(wrong):
    with pytest.raises(ContainerError, match="a container is"):
        grace_ext.decompress(wrong, 8)


def test_split():
    blobs = [grace_ext.compressor(text).compress(gauss(100, i)) for i, text in enumerate(codec_conformance.specs())]
    joined = np.concatenate(blobs)
    parts = container.split(joined, len(blobs), 100)
    assert [part.nbytes for part in parts] == [blob.size for blob in blobs]
    out = np.empty(100, np.float32)
    for part, blob in zip(parts, blobs, strict=True):
        decode_sum([part], out)
        assert np.array_equal(out, grace_ext.decompress(blob, 100))
    with pytest.raises(ContainerError, match=f"{blobs[-1].size} bytes follow the"):
        container.split(joined, len(blobs) - 1, 100)
    with pytest.raises(ContainerError):
        container.split(joined[:-1], len(blobs), 100)


def test_split_of_ranks_that_sent_nothing():
    blob = grace_ext.compressor("topk:0.1").compress(gauss(100))
    assert len(container.split(np.concatenate([blob, blob]), 4, 100)) == 2
    nothing = container.split(np.empty(0, np.uint8), 4, 100)
    out = np.ones(100, np.float32)
    decode_sum(nothing, out)
    assert nothing == [] and not out.any()
    rows, values = decode_rows(nothing, 10)
    assert rows.shape == (0,) and values.shape == (0, 10)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 2**14 - 1, 2**14, 2**28 - 1, 2**28, 2**31 - 1])
def test_varint(size):
    blob = container.pack_non_finite(size)
    assert blob.tobytes() == container_builder.container(flags=NON_FINITE, index=0, value=0, d=size)
    assert container.parse(blob, size).d == size
    assert blob.size == 5 + len(varint(size)) + 4


def test_overhead_of_the_largest_headers():
    """Rule 5, on headers alone: what the largest numbers below each limit cost."""

    def overhead(d, k, index_bytes, value_bytes):
        sizes = varint(d) + varint(k) + varint(index_bytes) + varint(value_bytes)
        return len(container_builder.container(k=0, d=0, index_section=b"", value_section=b"")) - 4 + len(sizes)

    assert overhead(2**28 - 1, 2**21 - 1, 2**21 - 1, 4 * (2**21 - 1)) <= 24
    assert overhead(2**31 - 1, 2**28 - 1, 2**28 - 1, 2**30 - 4) <= 27


def test_huge_d_allocates_nothing(monkeypatch):
    """A claim of 2**31 - 1 elements is refused, or read, before anything of that size exists."""
    makers = {name: getattr(np, name) for name in ("empty", "zeros", "full")}
    for name in makers:
        monkeypatch.setattr(
            np,
            name,
            lambda size, *rest, make=makers[name], **more: (
                make(size, *rest, **more) if np.prod(size) < 10_000 else pytest.fail(f"{size} elements")
            ),
        )
    claims = [
        container_builder.container(d=2**31 - 1, **more) for more in ({}, {"k": 2**31 - 1}, {"index": 0}, {"index": 3})
    ]
    claims.append(container_builder.container(d=2**31 - 1, flags=NON_FINITE, index=0, value=0))
    for blob in claims:
        refused("were expected", blob)
        assert container.parse(blob).d == 2**31 - 1
    refused(None, reseal(container_builder.container(d=2**31 - 1, flags=ORDER, k=2**31 - 1)))


def test_a_shape_that_no_container_can_be_read_with():
    for size in (2**31, 2**32):
        with pytest.raises(ConfigError, match="size above"):
            grace_ext.compressor("dense").compress(np.empty((0, size), np.float32), shape=True)
    blob = grace_ext.compressor("dense").compress(np.empty((0, 2**31 - 1), np.float32), shape=True)
    assert container.parse(blob).shape == (0, 2**31 - 1)


def test_a_tensor_too_large_for_a_container():
    with pytest.raises(ConfigError, match="split it"):
        container.pack_non_finite(2**31)
    huge = np.broadcast_to(np.float32(1), 2**31)
    with pytest.raises(ConfigError, match="split it"):
        grace_ext.compressor("dense").compress(huge)


def test_a_section_too_large_for_a_container():
    """Its length would be written, and no reader would take it."""
    few, many = np.empty(0, np.uint8), np.broadcast_to(np.uint8(0), 2**32)
    for index, value in ((few, many), (many, few)):
        with pytest.raises(ConfigError, match="a section of 4294967296 bytes is too large for one container"):
            container.pack(8, 4, 1, index, 0, value)

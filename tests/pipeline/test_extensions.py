"""Parts that exist in this file only: they use what no registered codec needs yet, or would do harm if let through."""

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss, same_bits

import grace_ext
from grace_ext import ContainerError
from grace_ext.index.base import IndexCodec
from grace_ext.kernels import bitmap_decode, bitmap_encode
from grace_ext.pipeline.container import parse
from grace_ext.registry import names, register
from grace_ext.value.base import ValueCodec
from grace_ext.value.half import Half


class SortedHalf(ValueCodec):
    """Sorts the values, as a curve fit does, and so needs the order section."""

    name, id = "test-sorted", 250

    def encode(self, values, stream):
        order = np.argsort(values, kind="stable").astype(np.uint32)
        return Half().encode(values[order], stream)[0], order

    decode = staticmethod(Half.decode)


class Pairs(IndexCodec):
    """One bit for two positions: the receiver rebuilds a larger support, as with a Bloom filter."""

    name, id, lossless = "test-pairs", 250, False

    def encode(self, indices, d):
        payload = np.zeros(((d + 1) // 2 + 7) // 8, np.uint8)
        pairs = np.unique(indices // 2).astype(np.uint32)
        bitmap_encode(pairs, payload)
        return payload, self._both(pairs, d)

    @staticmethod
    def _both(pairs, d):
        both = np.stack([2 * pairs, 2 * pairs + 1], 1).reshape(-1)
        return both[both < d]

    @staticmethod
    def decode(payload, d, out):
        if payload.size != ((d + 1) // 2 + 7) // 8:
            raise ContainerError("test-pairs: wrong length")
        pairs = np.empty(out.size, np.uint32)
        count = bitmap_decode(payload, pairs)
        support = Pairs._both(pairs[: max(count, 0)], d)
        if support.size != out.size:
            raise ContainerError("test-pairs: wrong count")
        out[:] = support


class BloatedIndex(IndexCodec):
    name, id = "test-bloated", 251

    def encode(self, indices, d):
        return np.zeros(4 * indices.size + 1, np.uint8), indices

    @staticmethod
    def decode(payload, d, out):
        raise ContainerError("test-bloated was sent")


class BloatedValue(ValueCodec):
    """As long as raw: no gain, so raw goes instead."""

    name, id = "test-bloated", 251

    def encode(self, values, stream):
        return np.zeros(4 * values.size, np.uint8), None

    @staticmethod
    def decode(payload, out):
        raise ContainerError("test-bloated was sent")


class BloatedOrder(ValueCodec):
    """Shorter than raw as long as an entry of the order takes less than 8 bits."""

    name, id = "test-order", 252
    lossless = True

    def encode(self, values, stream):
        order = np.arange(values.size)[::-1].astype(np.uint32)
        return np.zeros(3 * values.size, np.uint8), order

    @staticmethod
    def decode(payload, out):
        out[:] = 0


@pytest.fixture(autouse=True)
def registered(temporary_registry):
    for cls in (SortedHalf, Pairs, BloatedIndex, BloatedValue, BloatedOrder):
        register(cls)


@pytest.mark.parametrize("text", ["dense/test-sorted", "topk:0.1/rice/test-sorted", "topk:0.1/test-pairs/test-sorted"])
def test_a_codec_that_sorts(text):
    c = grace_ext.compressor(text)
    for gradient in codec_conformance.gradients().values():
        if gradient.size:
            codec_conformance.check_value_codec(c.value, gradient)
        codec_conformance.check_compressor(c, gradient)
        codec_conformance.check_feedback(c, [gradient, gradient[::-1].copy()])
    gradient = gauss(5000)
    blob = c.compress(gradient)
    parsed = parse(blob, 5000)
    assert parsed.value_id == SortedHalf.id
    assert parsed.order_section.size == (parsed.k * (parsed.k - 1).bit_length() + 7) // 8
    dense = grace_ext.decompress(blob, 5000)
    sent = dense != 0
    assert np.array_equal(dense[sent], gradient[sent].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("k, width", [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (256, 8), (257, 9), (1024, 10), (1025, 11)])
def test_order_is_stored_at_the_bit_length_of_k_minus_1(k, width):
    """Trap: a width from log2(max) is 0 for 1, 2, 4, 256, 1024."""
    gradient = gauss(k)
    blob = grace_ext.compressor("dense/test-sorted").compress(gradient)
    assert parse(blob).order_section.size == (k * width + 7) // 8
    assert np.array_equal(grace_ext.decompress(blob, k), gradient.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("value", names("value"))
def test_an_index_codec_that_rebuilds_more(value):
    """False positives carry the gradient's true values, on the plain and on the fused road."""
    codec = Pairs()
    for indices, d in codec_conformance.supports().values():
        codec_conformance.check_index_codec(codec, indices, d)
    c = grace_ext.compressor(f"topk:0.1/test-pairs/{value}")
    for gradient in codec_conformance.gradients().values():
        blob, dense = codec_conformance.check_compressor(c, gradient)
        codec_conformance.check_feedback(c, [gradient, gradient[::-1].copy()])
    gradient = gauss(4000)
    encoded = c.encode(gradient, codec_conformance.STREAM)
    assert encoded.support.size > 400
    assert same_bits(encoded.values, gradient[encoded.support])


def test_auto_takes_lossless_codecs_only():
    gradient = np.zeros(4000, np.float32)
    gradient[:2000] = 1  # a bit for two positions would be the shortest
    assert parse(grace_ext.compressor("topk:0.5/test-pairs/raw").compress(gradient)).index_id == Pairs.id
    assert parse(grace_ext.compressor("topk:0.5/auto/raw").compress(gradient)).index_id not in (0, Pairs.id)


def test_sections_longer_than_raw_go_raw():
    gradient = gauss(3000)
    c = grace_ext.compressor("topk:0.1/test-bloated/test-bloated")
    parsed = parse(c.compress(gradient))
    assert (parsed.index_id, parsed.value_id) == (1, 1)
    assert parsed.index_section.size == parsed.value_section.size == 4 * 300
    codec_conformance.check_compressor(grace_ext.compressor("topk:0.1/test-bloated/raw"), gradient)
    one = np.eye(1, 100_000, 77_777, dtype=np.float32)[0]
    assert parse(grace_ext.compressor("topk:1.0/bitmap/raw").compress(one)).index_id == 1
    noise = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32).view(np.float32)
    noise[~np.isfinite(noise)] = 1
    assert parse(grace_ext.compressor("dense/deflate").compress(noise)).value_id == 1


@pytest.mark.parametrize("k, fits", [(256, False), (129, False), (128, True), (100, True)])
def test_the_order_counts_as_part_of_the_value_section(k, fits):
    """3 bytes and 8 bits are as long as raw's 4 bytes; 3 bytes and 7 bits are shorter."""
    blob = grace_ext.compressor("dense/test-order").compress(gauss(k))
    assert parse(blob).value_id == (BloatedOrder.id if fits else 1)
    assert (parse(blob).order_section is not None) == fits

"""Positions in the order of the values: what receivers get is what they get of ascending ones with an order section."""

import numpy as np
import pytest
from support import container_builder
from support.arrays import gauss, same_bits
from support.codec_conformance import refused
from support.container_builder import f32, u32

import grace_ext
from grace_ext._util.rng import Stream
from grace_ext.index.keys import Keys
from grace_ext.index.rows import Rows
from grace_ext.pipeline import decoder
from grace_ext.pipeline.container import parse

SORTING = ["polyfit", "dexp", "polyfit:0:segments=1"]


def containers(value, gradient, before="topk:0.1"):
    """Parsed, by index codec."""
    return {name: parse(grace_ext.compressor(f"{before}/{name}/{value}").compress(gradient)) for name in ("keys", "raw")}


@pytest.mark.parametrize("value", SORTING)
def test_they_take_the_place_of_the_order_section(value):
    gradient = gauss(30_000)
    found = containers(value, gradient)
    keys, raw = found["keys"], found["raw"]
    assert keys.index_id == Keys.id and keys.order_section is None
    assert same_bits(keys.value_section, raw.value_section)
    assert keys.nbytes == raw.nbytes - (3000 * 12 + 7) // 8
    sent = gradient[keys.index_section.copy().view("<u4")]
    count = int((sent > 0).sum())
    assert (
        (sent[:count] > 0).all()
        and (np.diff(np.abs(sent[:count])) >= 0).all()
        and (np.diff(np.abs(sent[count:])) >= 0).all()
    )


@pytest.mark.parametrize("before", ["topk:0.1", "dct:8/topk:0.1", "randomk:0.2:unbiased=true", "topk:1.0", "topk:0.00001"])
def test_all_decoders_give_what_they_give_of_an_order_section(before):
    own, other = (containers("polyfit", gauss(20_000, seed), before) for seed in (0, 1))
    results = {}
    for name in ("keys", "raw"):
        pair, arrays = [own[name], other[name]], [np.full(20_000, 3, np.float32) for _ in range(3)]
        decoder.decode_sum(pair, arrays[0], 0.3)
        decoder.decode_sender_mean(pair, arrays[1])
        decoder.add_all(pair, arrays[2])
        if own[name].transform is None:
            arrays += [*decoder.decode_rows(pair, 16), *decoder.sum_at(pair, 20_000, 0.5)]
        results[name] = arrays
    for keys, raw in zip(results["keys"], results["raw"], strict=True):
        assert same_bits(keys, raw)


@pytest.mark.parametrize("value", ["raw", "qsgd:7", "sketchml"])
def test_where_nothing_is_sorted_they_are_ascending(value):
    found = containers(value, gauss(30_000))
    assert found["keys"].index_id == Keys.id and found["raw"].order_section is None
    assert same_bits(found["keys"].index_section, found["raw"].index_section)
    assert found["keys"].nbytes == found["raw"].nbytes


def test_a_fit_that_does_not_pay_goes_raw_and_in_order():
    parsed = parse(grace_ext.compressor("topk:0.1/keys/polyfit").compress(gauss(30)))
    assert (parsed.index_id, parsed.value_id, parsed.k) == (Keys.id, 1, 3)
    assert (np.diff(parsed.index_section.copy().view("<u4").astype(int)) > 0).all()


@pytest.mark.parametrize("value", SORTING)
def test_error_feedback_keeps_what_receivers_do_not_get(value):
    c, gradient, pending = grace_ext.compressor(f"topk:0.1/keys/{value}"), gauss(5000), np.empty(5000, np.float32)
    encoded = c.encode_compensated(gradient, np.zeros(5000, np.float32), pending, Stream())
    assert same_bits(pending, gradient - grace_ext.decompress(encoded.blob, 5000))
    assert encoded.index_codec == "keys" and encoded.index_bytes == 4 * 500


def test_they_are_no_part_of_another_codec():
    """Of `rows`, whose parts have no values of their own."""
    section = bytes([Keys.id, 0]) + u32(2, 2, 8) + u32(0, 1)
    values = f32(1, 1, 1, 1)
    refused(
        "index codec 13", container_builder.container(index=Rows.id, d=8, k=4, index_section=section, value_section=values)
    )
    fine = container_builder.container(index=Rows.id, d=8, k=4, index_section=b"\1" + section[1:], value_section=values)
    assert grace_ext.decompress(fine, 8).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_auto_leaves_them_to_raw():
    few = np.zeros(2**21, np.float32)
    few[[5, 2**20]] = 1
    assert parse(grace_ext.compressor("nonzero/auto/raw").compress(few)).index_id != Keys.id

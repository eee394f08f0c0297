"""Quantizers: the same sections as the host's codecs write, the same values from them, and the same remainder."""

import numpy as np
import torch
from inputs import KINDS, STREAM, same, tensor, vector
from support.checking import check

from grace_ext.adapters._torch import device_values
from grace_ext.adapters._torch.device_codec import Source
from grace_ext.adapters._torch.kernels import lloyd
from grace_ext.adapters._torch.mailbox import Inbox, Outbox
from grace_ext.kernels.lloyd import SAMPLE, moments
from grace_ext.value.bfloat import BFloat16
from grace_ext.value.half import Half
from grace_ext.value.lloyd import Lloyd
from grace_ext.value.minmax import MinMax
from grace_ext.value.natural import Natural
from grace_ext.value.onebit import OneBit
from grace_ext.value.qsgd import QSGD
from grace_ext.value.raw import RawValue
from grace_ext.value.sign import Sign
from grace_ext.value.sketchml import SketchML
from grace_ext.value.terngrad import TernGrad
from grace_ext.value.threelc import ThreeLC

CODECS = [
    TernGrad(),
    MinMax(),
    MinMax(3),
    MinMax(8, 41),
    MinMax(3, 7),
    Natural(),
    Natural(2),
    Natural(8),
    OneBit(),
    OneBit(8),
    Sign(),
    Sign("mean", 8),
    Sign("one"),
    Half(),
    BFloat16(),
    QSGD(7),
    QSGD(8, 64, norm="l2"),
    QSGD(2, 8),
    QSGD(3, 8, norm="l2"),
    QSGD(4, 512, levels=5, norm="l2"),
    QSGD(6, 2048, levels=17),
    ThreeLC(),
    ThreeLC(1.75),
    SketchML(7),
    SketchML(20, "huffman"),
    Lloyd(),
    Lloyd(0.3, "none"),
    Lloyd(0.01),
]


def up_to(codec, most):
    """So many values, but not of more than 6 buckets: each is a program, which takes the interpreter milliseconds."""
    return min(most, 6 * (getattr(codec, "bucket", 0) or 512) - 3)


def compare(codec, values, source, remainder, expected_remainder):
    section, order = codec.encode(values, STREAM)
    assert order is None
    on_device = device_values.find(codec)
    source = on_device.prepare(source)
    outbox = Outbox({"special": 4, **on_device.sizes(values.size)}, "cpu")
    on_device.encode(source, outbox, outbox.view("special", torch.int32), STREAM.key())
    fetched = outbox.fetch()
    assert not fetched["special"].any()
    assert on_device.section(fetched).tobytes() == section.tobytes(), str(codec)
    on_device.subtract(source)
    assert same(remainder, expected_remainder), "remainder"

    decoded, own, bad = np.empty_like(values), torch.empty(values.size), torch.zeros(1, dtype=torch.int32)
    codec.decode(section, decoded)
    parts, options = device_values.find_decoder(codec.id).unpack(section, values.size)
    inbox = Inbox({f"x {name}": part for name, part in parts.items()}, "cpu")
    on_device.decode(inbox, "x", own, bad, **options)
    assert same(own, decoded) and not bad.any()


@check
def sections_values_and_remainders_are_the_same():
    for codec in CODECS:
        for kind in KINDS:
            for n in {1, 8, 9, up_to(codec, 513), up_to(codec, 2100)} if kind == "normal" else {85}:
                values = vector(kind, n)
                decoded = np.empty(n, np.float32)
                codec.decode(codec.encode(values, STREAM)[0], decoded)
                remainder = tensor(values)
                compare(codec, values, Source(remainder, None, None, remainder), remainder, values - decoded)


@check
def moments_of_many_blocks_are_the_host_s_in_every_bit():
    n = 17 * lloyd.SQUARES_BLOCK + 5
    for kind in ("normal", "denormal", "huge"):
        values, expected = vector(kind, n), np.empty(3)
        moments(values, expected)
        _, found, counts, sample = lloyd.moments_and_counts(Source(tensor(values), None, None, None), 0.05)
        assert same(torch.from_numpy(found), expected), kind
        assert 0 < counts.sum() <= sample == SAMPLE


@check
def a_residual_is_added_first_and_the_sum_is_not_needed_elsewhere():
    for codec in CODECS:
        n = up_to(codec, 1030)
        values, residual = vector("normal", n), vector("denormal", n, 1) + vector("ties", n, 2)
        summed = values + residual
        decoded = np.empty_like(summed)
        codec.decode(codec.encode(summed, STREAM)[0], decoded)
        remainder = tensor(values)
        compare(codec, summed, Source(remainder, tensor(residual), None, remainder), remainder, summed - decoded)


@check
def the_remainder_of_selected_values_goes_to_their_positions():
    for codec in CODECS:
        n = up_to(codec, 600)
        values, positions = vector("normal", n), np.sort(np.random.default_rng(0).permutation(5000)[:n]).astype(np.int32)
        decoded = np.empty_like(values)
        codec.decode(codec.encode(values, STREAM)[0], decoded)
        expected = vector("normal", 5000, 1)
        remainder = tensor(expected)
        expected[positions] = values - decoded
        compare(codec, values, Source(tensor(values), None, tensor(positions), remainder), remainder, expected)


@check
def what_is_not_finite_is_told():
    for codec in CODECS:
        for special in (np.nan, -np.inf):
            values = vector("normal", up_to(codec, 600))
            values[values.size - 4] = special
            on_device = device_values.find(codec)
            source = on_device.prepare(Source(tensor(values)))
            if source is None:
                continue
            outbox = Outbox({"special": 4, **on_device.sizes(values.size)}, "cpu")
            on_device.encode(source, outbox, outbox.view("special", torch.int32), STREAM.key())
            assert outbox.fetch()["special"].any()


@check
def codecs_without_kernels_stay_on_the_host():
    for codec in (
        QSGD(entropy="ans"),
        QSGD(levels=128),
        QSGD(bucket=4096),
        OneBit(0),
        OneBit(4096),
        TernGrad("ans"),
        MinMax(chunk=4096),
        Natural(entropy="ans"),
        RawValue(),
    ):
        assert device_values.find(codec) is None, codec

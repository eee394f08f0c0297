"""sketchml: the quantile sketch against its reference implementation, its error, and sections that are refused."""

import struct

import numpy as np
import pytest
from support.arrays import gauss
from support.fits import CASES, error, heavy, round_trip, sketch, value
from support.reference_kernels import fits as reference_fits

from grace_ext import ContainerError
from grace_ext.value.sketchml import SketchML


@pytest.mark.parametrize("most, bins", [(4, 16), (64, 1024), (256, 2048)])
@pytest.mark.parametrize("name", CASES)
def test_sketch(name, most, bins):
    values = CASES[name][:5000]
    levels, table = sketch(values, most, bins)
    expected, means = reference_fits.sketch(values, most, bins)
    assert levels.tolist() == expected
    # The kernel's sums are rounded at each step.
    assert table.size <= most and np.allclose(table, means, rtol=1e-6, atol=1e-9 * np.abs(values).max())


def test_buckets_hold_equal_counts():
    values = heavy()
    levels, table = sketch(values, 64, 1 << 14)
    counts = np.bincount(levels)
    assert counts.size == table.size == 64
    assert 0.9 * values.size / 64 < counts.min() and counts.max() < 1.1 * values.size / 64
    order = np.argsort(values)
    assert (np.diff(levels[order].astype(int)) >= 0).mean() == 1, "the buckets overlap"
    assert (np.diff(table) > 0).all()


@pytest.mark.parametrize("text", ["sketchml", "sketchml:4", "sketchml:7:entropy=huffman", "sketchml:256:entropy=ans"])
@pytest.mark.parametrize("name", CASES)
def test_the_sketch_keeps_signs_and_zeros(name, text):
    values = CASES[name]
    decoded, _ = round_trip(value(text), values)
    assert np.array_equal(np.sign(decoded), np.sign(values))
    assert np.abs(decoded).max() <= np.abs(values).max()


def test_few_distinct_values_are_exact():
    for values in (
        CASES["ties"],
        CASES["all equal"],
        CASES["one value in zeros"],
        np.repeat(np.array([1e-30, 1e30, -1, 0], np.float32), 100),
    ):
        assert np.array_equal(round_trip(SketchML(), values)[0], values)


def test_sketch_error():
    """The notes had .18 on such values; a code of the numbers gains where values repeat, and only there."""
    values = heavy()
    decoded, size = round_trip(SketchML(), values)
    assert error(values, decoded) < 0.18 and abs(size * 8 / values.size - 6) < 0.25
    for entropy in ("huffman", "ans"):
        same, coded = round_trip(SketchML(entropy=entropy), values)
        assert np.array_equal(same, decoded) and coded <= size
        zeros = np.where(np.arange(5000) % 20 == 0, gauss(5000), 0).astype(np.float32)
        assert round_trip(SketchML(entropy=entropy), zeros)[1] < 0.5 * round_trip(SketchML(), zeros)[1]


def forged_sketch(last=1, table=(1, 2), levels=(0, 0b101)):
    return np.frombuffer(bytes([last]) + struct.pack(f"<{len(table)}f", *table) + bytes(levels), np.uint8)


@pytest.mark.parametrize(
    "message, payload",
    [
        ("the table is missing", np.zeros(0, np.uint8)),
        ("the table is missing", forged_sketch()[:8]),
        ("the table is missing", forged_sketch(255)),
        ("levels", forged_sketch()[:-1]),
        ("levels", forged_sketch()[:-2]),
        ("a level is out of range", forged_sketch(2, (1, 2, 3), (0, 0b111111))),
        ("a mean is not finite", forged_sketch(table=(1, float("inf")))),
        ("a mean is not finite", forged_sketch(table=(float("nan"), 1))),
    ],
)
def test_sketchml_refuses(message, payload):
    out = np.zeros(3, np.float32)
    SketchML.decode(forged_sketch(), out)
    assert out.tolist() == [2, 1, 2]
    with pytest.raises(ContainerError, match=message):
        SketchML.decode(payload, out)

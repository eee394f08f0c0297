"""row_context: columns that repeat from row to row, the width that is found, and payloads that are damaged."""

import math

import numpy as np
import pytest
from support import codec_conformance, reference_decoder
from support.guards import guarded
from support.position_inputs import ascending
from support.reference_kernels import index as reference_index

from grace_ext import ConfigError, ContainerError, registry
from grace_ext._util.head import varint
from grace_ext.index.auto import Auto
from grace_ext.index.row_context import RowContext
from grace_ext.kernels import _spread
from grace_ext.kernels import row_context as kernels


def table(rows, width, touched, density, seed=0, kept=0.9):
    """Positions in some rows of a table: columns stay from one touched row to the next, or are drawn anew."""
    rng = np.random.default_rng(seed)
    columns = rng.random(width) < density
    found = []
    for row in ascending(rows, touched, seed):
        columns = np.where(rng.random(width) < kept, columns, rng.random(width) < density)
        columns[rng.integers(width)] = True
        found.append(int(row) * width + np.flatnonzero(columns))
    return np.concatenate(found).astype(np.uint32), rows * width


def joined(positions, width, domain, history, counts, domains, out):
    bitmap, intact = guarded((domain + history * width) // 64 + 3, np.uint64)
    classes, unwritten = guarded(domain // 64 + 2 * counts.size, np.uint64)
    good = kernels.join_by_history(positions, width, domain, history, counts, domains, bitmap, classes, out)
    assert intact() and unwritten()
    return good


def bound(d, k):
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


TABLES = {
    "some rows": table(300, 96, 60, 0.3),
    "all rows": table(50, 100, 50, 0.5),
    "one row": table(40, 64, 1, 0.5),
    "narrow": table(200, 7, 80, 0.4),
    "whole rows": table(100, 16, 30, 1.1),
}


@pytest.mark.parametrize("name", TABLES)
def test_kernels_against_the_reference_implementation(name):
    indices, d = TABLES[name]
    width = {"some rows": 96, "all rows": 100, "one row": 64, "narrow": 7, "whole rows": 16}[name]
    touched = np.unique(indices // width)
    compact = (np.searchsorted(touched, indices // width) * width + indices % width).astype(np.uint32)
    domain = touched.size * width - 3 * (name == "all rows")  # the last row may be short
    compact = compact[compact < domain]
    k = compact.size
    for history in (1, 2, 5, 6):
        expected = reference_index.classes_by_history(compact.tolist(), width, domain, history)
        (out, intact), (counts, domains) = guarded(k, np.uint32), np.empty((2, 1 << history), np.int64)
        bitmap, unwritten = guarded((domain + history * width) // 64 + 2, np.uint64)
        kernels.split_by_history(compact, width, domain, history, bitmap, out, counts, domains)
        assert intact() and unwritten() and domains.tolist() == [elements for elements, _ in expected]
        assert out.tolist() == [x for _, positions in expected for x in positions]
        assert counts.tolist() == [len(positions) for _, positions in expected]
        again, intact = guarded(k, np.uint32)
        assert joined(out, width, domain, history, counts, domains, again) and intact()
        assert np.array_equal(again, compact)


def test_kernels_on_random_tables_and_on_any_content():
    """Classes whose positions do not ascend, or are too large, are written to no other place than the result."""
    rng = np.random.default_rng(1)
    for number in range(200):
        width, rows, history = int(rng.integers(1, 40)), int(rng.integers(1, 30)), int(rng.integers(1, 9))
        compact = np.flatnonzero(rng.random(rows * width) < rng.choice([0.02, 0.1, 0.5, 1.0])).astype(np.uint32)
        domain = rows * width - int(rng.integers(0, width))  # the last row may be short
        compact = compact[compact < domain]
        if not (k := compact.size):
            continue
        expected = reference_index.classes_by_history(compact.tolist(), width, domain, history)
        out, (counts, domains) = np.empty(k, np.uint32), np.empty((2, 1 << history), np.int64)
        bitmap, unwritten = guarded((domain + history * width) // 64 + 2, np.uint64)
        kernels.split_by_history(compact, width, domain, history, bitmap, out, counts, domains)
        assert unwritten()
        assert domains.tolist() == [elements for elements, _ in expected]
        assert out.tolist() == [x for _, positions in expected for x in positions]
        again = np.empty(k, np.uint32)
        assert joined(out, width, domain, history, counts, domains, again) and np.array_equal(again, compact)
        junk = rng.integers(0, domain + 3, k).astype(np.uint32) if number % 2 else out[rng.permutation(k)]
        again, intact = guarded(k, np.uint32)
        joined(junk, width, domain, history, counts, domains, again)
        assert intact()


@pytest.mark.parametrize("move", [_spread.spread, _spread.spread_one_by_one])
def test_bits_are_spread_over_a_mask(move):
    rng = np.random.default_rng(2)
    for mask in [0, 1, 1 << 63, (1 << 64) - 1, *(int(rng.integers(1 << 63)) for _ in range(200))]:
        bits = int(rng.integers(1 << 63)) << 1 | 1
        places = [place for place in range(64) if mask >> place & 1]
        expected = sum((bits >> number & 1) << place for number, place in enumerate(places))
        assert int(move(np.uint64(bits), np.uint64(mask))) == expected


@pytest.mark.parametrize("kept", [0.02, 0.1, 0.2, 0.9])
def test_the_likely_width_is_that_of_the_reference_implementation(kept):
    widths = np.array([32, 48, 64, 96, 128, 192, 256], np.uint32)
    found = set()
    for seed in range(6):
        indices, _ = table(400, 96, 120, 0.3, seed, kept)
        for size, more in ((100, 100), (100, 250), (250, 250)):
            width = kernels.likely_width(indices, widths, 6, size, more)
            assert width == reference_index.likely_width(indices.tolist(), widths.tolist(), 6, size, more)
            found.add((width, more > size))
    assert {width for width, _ in found} <= {0, 96, 192}
    if kept == 0.2:  # more positions tell
        assert (96, True) in found and (0, False) in found


@pytest.mark.parametrize("name", TABLES)
def test_second_decoder(name):
    indices, d = TABLES[name]
    for width in (0, 1, 7, 96, 100, 65536):
        payload, support = RowContext(width).encode(indices, d)
        assert support is indices and payload.size == RowContext(width).size(indices, d)
        assert reference_decoder.INDEX[12](payload.tobytes(), d, indices.size) == indices.tolist()
        out = np.empty_like(indices)
        RowContext.decode(payload, d, out)
        assert np.array_equal(out, indices)


@pytest.mark.parametrize("width", [1, 3, 16])
def test_narrow_rows_have_few_classes(width):
    """With 65,536 positions there would be 16. Decoding visits each class in each row."""
    indices = ascending(200_000, 1 << 16)
    payload, _ = RowContext(width).encode(indices, 200_000)
    assert payload[0] == {1: 2, 3: 3, 16: 4}[width]
    out = np.empty_like(indices)
    RowContext.decode(payload, 200_000, out)
    assert np.array_equal(out, indices)


@pytest.mark.parametrize("width", [64, 100, 256, 768])
@pytest.mark.parametrize("touched", [300, 1000])
def test_the_width_is_found(width, touched):
    indices, d = table(2000, width, touched, 0.25, seed=width)
    assert RowContext().encode(indices, d)[0].size <= 1.02 * RowContext(width).encode(indices, d)[0].size
    others = [codec for codec in registry.classes("index") if codec.lossless and codec.universal and codec.id]
    shortest = min(codec().size(indices, d) for codec in others if not codec.composite)
    assert Auto().choose(indices, d).name == "row_context"
    assert Auto().encode(indices, d)[0].size < 0.75 * shortest


def test_a_width_that_is_only_likely_is_looked_for_in_more_positions():
    """As in an embedding's gradient with its residual, of which 3,072 of 260,000 positions did not tell."""
    indices, d = table(3000, 256, 2000, 0.25, seed=1, kept=0.06)
    assert kernels.likely_width(indices, np.array([256], np.uint32), 6, 512, 512) == 0
    assert RowContext().encode(indices, d)[0].tobytes() == RowContext(256).encode(indices, d)[0].tobytes()


def test_in_few_positions_a_width_is_looked_for_where_they_cluster():
    """As in the top 0.1 % of a small transformer, of which zlib needed less than `auto` chose."""
    indices, d = table(8000, 128, 40, 0.3)
    assert 1024 < indices.size < 4096
    assert Auto().choose(indices, d).name == "row_context"
    assert RowContext().encode(indices, d)[0].tobytes() == RowContext(128).encode(indices, d)[0].tobytes()
    dense, d = table(40, 128, 40, 0.3)
    assert 1024 < dense.size < 4096 and RowContext().encode(dense, d)[0][0] == 0


def test_nothing_is_looked_for_in_few_positions_and_nothing_found_in_random_ones():
    for indices, d in (table(300, 64, 20, 0.3), (ascending(10**6, 20_000), 10**6), (np.arange(9000, dtype=np.uint32), 9000)):
        payload = RowContext().encode(indices, d)[0]
        assert payload[0] == 0 and payload[1:].tobytes() == indices.astype("<u4").tobytes()
        assert 8 * Auto().encode(indices, d)[0].size <= max(1.02 * bound(d, indices.size), 150)


def test_rows_that_are_nearly_empty_are_sent_as_they_are():
    """A receiver goes through all elements of the touched rows, so they may be at most 64 for each position."""
    indices = np.arange(0, 10**6, 1000, dtype=np.uint32)
    assert RowContext(1000).encode(indices, 10**6)[0][0] == 0


def head(*numbers):
    return b"".join(map(varint, numbers))


GOOD = (1, 4, 2, 1, 8, 1, 2, 6, 8, 0, 2, 2, 0)  # two rows of 4: columns 0 and 1, and the same again
ROWS, FIRST = np.array([0, 2], "<u4").tobytes(), np.array([0, 1], "<u4").tobytes()


def decoded(payload, d=12, k=4):
    out = np.empty(k, np.uint32)
    RowContext.decode(np.frombuffer(payload, np.uint8), d, out)
    return out.tolist()


def test_a_payload_by_hand():
    assert decoded(head(*GOOD) + ROWS + FIRST) == [0, 1, 8, 9]


@pytest.mark.parametrize(
    "payload, message",
    [
        (b"", "ends before row_context: the bits of history"),
        (head(*GOOD)[:-1], "ends before row_context: a number of a class"),
        (head(7, *GOOD[1:]) + ROWS + FIRST, "out of range"),
        (head(1, 65537, *GOOD[2:]) + ROWS + FIRST, "out of range"),
        (head(1, 0, *GOOD[2:]) + ROWS + FIRST, "out of range"),
        (head(5, 4, *GOOD[2:]) + ROWS + FIRST, "out of range"),
        (head(3, 1, *GOOD[2:]) + ROWS + FIRST, "out of range"),
        (b"\x81\x00" + head(*GOOD[1:]) + ROWS + FIRST, "shortest form"),
        (head(1, 4, 0, *GOOD[3:]) + ROWS + FIRST, "0 rows of 4"),
        (head(1, 4, 5, *GOOD[3:]) + ROWS + FIRST, "5 rows of 4"),
        (head(*GOOD) + ROWS + FIRST[:-1], "ends before a section of 8 bytes"),
        (head(*GOOD) + ROWS + FIRST + b"\0", "elements that they should have"),
        (head(1, 4, 2, 12, *GOOD[4:]) + ROWS + FIRST, "index codec 12 cannot be"),
        (head(*GOOD[:5], 0, *GOOD[6:]) + ROWS + FIRST, "cannot be coded by 0"),
        (head(*GOOD[:6], 3, *GOOD[7:]) + ROWS + FIRST, "not those of 4 positions in 2 rows"),
        (head(*GOOD[:7], 5, *GOOD[8:10], 2, 3, 0) + ROWS + FIRST, "cannot be coded by 0"),
        (head(*GOOD[:5], 1, 4, 8, 16, 0, 0, 0, 0) + ROWS + FIRST + FIRST, "not ascending"),
        (head(*GOOD) + ROWS + np.array([0, 4], "<u4").tobytes(), "elements that they should have"),
        (b"\0" + FIRST, "8 bytes for 4 positions"),
    ],
)
def test_malformed(payload, message):
    with pytest.raises(ContainerError, match=message):
        decoded(payload)


def test_damaged_sections_never_do_harm():
    indices, d = TABLES["some rows"]
    payload, _ = RowContext(96).encode(indices, d)
    for bad in codec_conformance.mutations(payload, count=500):
        out = np.empty_like(indices)
        if codec_conformance.refused_or(lambda data, into: RowContext.decode(data, d, into), bad, out):
            assert out[-1] < d and (out[1:] > out[:-1]).all()


@pytest.mark.parametrize("width", [-1, 65537])
def test_options(width):
    with pytest.raises(ConfigError, match="allowed: 0"):
        RowContext(width)

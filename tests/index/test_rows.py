"""rows: sections that name rows of a table, in any way that the format allows, and damaged ones."""

import struct

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import gauss
from support.in_process_ranks import on_all_ranks
from support.row_exchanges import ROWS, WIDTH, make, rows_of, step

import grace_ext
from grace_ext import ContainerError, registry
from grace_ext.index.rows import Rows
from grace_ext.pipeline import container
from grace_ext.pipeline.decoder import decode_rows
from grace_ext.value.raw import RawValue


def packed(index_id, section, k, value=1.0, d=ROWS * WIDTH):
    return container.parse(container.pack(d, k, index_id, section, RawValue.id, np.full(k, value, "<f4").view(np.uint8)))


def section(row_codec, codec, width, touched, row_part, part):
    head = struct.pack("<BBIII", row_codec, codec, width, touched, len(row_part))
    return np.frombuffer(head + row_part + part, np.uint8)


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def test_ranks_may_name_positions_in_any_way():
    """Another index codec, another width: the result depends on the positions only."""
    indices = np.array([0, 1, 24, 50, 51, 52, 7199], np.uint32)
    forms = [
        packed(codec.id, codec.encode(indices, ROWS * WIDTH)[0], 7, value)
        for value, codec in ((1, Rows(WIDTH)), (2, Rows(5)), (4, registry.build("index", "varint")))
    ]
    rows, values = decode_rows(forms, WIDTH, 0.5)
    assert rows.tolist() == [0, 1, 2, 299]
    expected = np.zeros(ROWS * WIDTH, np.float32)
    expected[indices] = 3.5
    assert np.array_equal(values, expected.reshape(ROWS, WIDTH)[rows])


@pytest.mark.parametrize(
    "bad, k",
    [
        (section(0, 0, 24, 1, b"", b""), 24),  # all rows, but 1 of them
        (section(1, 0, 24, 1, u32(300), b""), 24),  # no such row
        (section(1, 0, 24, 2, u32(3, 3), b""), 48),
        (section(1, 0, 24, 2, u32(3, 4), b""), 24),  # two whole rows have 48
        (section(1, 0, 24, 2, u32(3, 4), b"\0"), 48),
        (section(1, 1, 24, 2, u32(3, 4), u32(0, 48)), 2),
        (section(1, 1, 24, 2, u32(3, 4), u32(0, 1)), 2),  # nothing in row 4
        (section(1, 1, 24, 2, u32(3, 4), u32(24, 25)), 2),  # nothing in row 3
        (section(1, 1, 24, 3, u32(3, 4, 5), u32(0, 1)), 2),  # more rows than positions
        (section(1, 1, 0, 2, u32(3, 4), u32(0, 30)), 2),
        (section(1, 1, 24, 0, b"", u32(0, 30)), 2),
        (section(9, 1, 24, 2, u32(3, 4), u32(0, 30)), 2),
        (section(1, 10, 24, 2, u32(3, 4), bytes(8)), 2),
        (section(1, 11, 24, 2, u32(3, 4), section(1, 1, 1, 2, u32(0, 30), b"").tobytes()), 2),
        (section(1, 99, 24, 2, u32(3, 4), u32(0, 30)), 2),
        (section(1, 1, 24, 2, u32(3, 4), u32(0, 30))[:-1], 2),
        (section(1, 1, 24, 2, u32(3, 4), u32(0, 30))[:13], 2),
        (section(0, 1, 24, 300, b"", u32(*range(0, 7176, 24))), 299),
    ],
)
def test_malicious_sections(bad, k):
    with pytest.raises(ContainerError, match="rows|index"):
        decode_rows([packed(Rows.id, bad, k)], WIDTH)


def test_containers_of_something_else():
    for blob in (
        grace_ext.compressor("dense/raw").compress(gauss(ROWS * WIDTH)),
        grace_ext.compressor("dct/topk:0.1/raw").compress(gauss(ROWS * WIDTH)),
    ):
        with pytest.raises(ContainerError, match="neither dense nor transformed"):
            decode_rows([container.parse(blob)], WIDTH)

    def work(transport):
        exchange = make(transport, "dense/raw", (301 if transport.rank == 2 else 300, WIDTH))
        with pytest.raises(ContainerError, match="were expected"):
            step(exchange, rows_of(1))

    on_all_ranks(work)


def test_damaged_sections_never_do_harm():
    indices = np.sort(np.random.default_rng(0).choice(ROWS * WIDTH, 500, replace=False)).astype(np.uint32)
    for chosen in (indices, np.arange(480, 960, dtype=np.uint32)):
        good, _ = Rows(WIDTH).encode(chosen, ROWS * WIDTH)
        for bad in codec_conformance.mutations(good, count=500):
            try:
                rows, values = decode_rows([packed(Rows.id, bad, chosen.size)], WIDTH)
            except ContainerError:
                continue
            assert rows[-1] < ROWS and values.shape == (rows.size, WIDTH) and (values == 1).sum() == chosen.size

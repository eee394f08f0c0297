"""Gradients that come as rows of a table, through the exchange."""

import tracemalloc

import numpy as np
import pytest
from support.arrays import same_bits
from support.exchanges import arrays_of
from support.in_process_ranks import RANKS, on_all_ranks
from support.row_exchanges import ROWS, SHAPE, WIDTH, make, rows_of, step

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.row_buckets import RowGradient, row_bucket
from grace_ext.index.rows import Rows
from grace_ext.observe.capture import Capture
from grace_ext.transport import InProcessGroup

LOSSLESS = [
    "dense/raw",
    "dense/deflate",
    "nonzero/raw",
    "topk:1.0/bitmap/raw",
    "dense/bloom/raw",
    "powersgd:4",
    "dct/topk:0.1/rice/qsgd",
]
LOSSY = [
    "topk:0.1/raw",
    "topk:0.1/rice/qsgd:7",
    "dense/qsgd:4",
    "randomk:0.2",
    "randomk:0.2/shared/fp16",
    "dense/lloyd:0.1",
    "threshold:1.5/bloom/raw",
    "dgc:0.1",
    "topk:0.001/raw",
    "dense/onebit",
]


def dense(given, shape=SHAPE):
    """float32[rows, width]: duplicates summed in their order."""
    table = np.zeros((shape[0], int(np.prod(shape[1:]))), np.float32)
    for row, values in zip(given.indices, given.values, strict=True):
        table[row] += values
    return table


def average(tables):
    total = np.zeros_like(tables[0])
    for table in tables:
        total += np.float32(1 / len(tables)) * table
    return total


def check_result(out, shape=SHAPE):
    assert out.indices.dtype == np.int64 and (np.diff(out.indices) > 0).all()
    assert out.values.dtype == np.float32 and out.values.shape == (out.indices.size, int(np.prod(shape[1:])))


@pytest.mark.parametrize("spec", LOSSLESS)
def test_exact(spec):
    """The result is that of a scatter-add on every rank, to the bit, and exactly the touched rows are named."""
    given = [[rows_of(10 * step + rank) for rank in range(RANKS)] for step in range(2)]

    def work(transport):
        exchange = make(transport, spec)
        results = [step(exchange, given[i][transport.rank])[0] for i in range(2)]
        return results, exchange

    for results, exchange in on_all_ranks(work):
        for out, gradients in zip(results, given, strict=True):
            check_result(out)
            assert out.indices.tolist() == sorted(set(np.concatenate([g.indices for g in gradients]).tolist()))
            assert dense(out).tobytes() == average([dense(g) for g in gradients]).tobytes()
        state = arrays_of(exchange)
        assert not any(residual.any() for residual in state.values())
        if exchange.buckets[0].compressor.sparsifier.name == "dense":
            assert not state, "what is exact needs no table of residuals"


@pytest.mark.parametrize("spec", LOSSY)
def test_nothing_is_lost(spec):
    """Per rank: sum of gradients = sum of what was sent + residual, over steps that touch different rows."""

    def work(transport):
        exchange = make(transport, spec)
        received, outs = np.zeros((ROWS, WIDTH)), []
        for i in range(5):
            out, finite = step(exchange, rows_of(10 * i + transport.rank))
            check_result(out)
            assert finite
            received += dense(out)
            outs.append((out.indices.tobytes(), out.values.tobytes()))
        return received, arrays_of(exchange)["residual:emb"], outs

    results = on_all_ranks(work)
    given = np.mean([sum(dense(rows_of(10 * i + rank)) for i in range(5)) for rank in range(RANKS)], axis=0)
    residual = np.mean([state for _, state, _ in results], axis=0).reshape(ROWS, WIDTH)
    for received, _, outs in results:
        np.testing.assert_allclose(received + residual, given, atol=1e-5)
        assert outs == results[0][2], "ranks differ"


@pytest.mark.parametrize("spec", LOSSY)
def test_the_same_as_a_dense_gradient_of_the_touched_rows(spec):
    """The vector that is compressed is that of the touched rows and no other."""
    given = rows_of(3)
    touched = np.unique(given.indices)
    compact = dense(given)[touched].reshape(-1)
    c = grace_ext.compressor(spec)
    expected = grace_ext.decompress(c.compress(compact, name="emb"), compact.size) if c.index.lossless else None

    def work(transport):
        exchange = make(transport, spec, memory="none")
        return step(exchange, given)[0]

    (out,) = on_all_ranks(work, ranks=1)
    check_result(out)
    if expected is not None:
        assert dense(out)[touched].reshape(-1).tobytes() == expected.tobytes()


def test_unbiased_values_are_scaled_by_the_touched_rows():
    given = RowGradient(np.arange(0, 100, 2), np.ones((50, WIDTH), np.float32))

    def work(transport):
        return step(make(transport, "randomk:0.25:unbiased=true", memory="none"), given)[0]

    (out,) = on_all_ranks(work, ranks=1)
    assert set(np.unique(out.values)) == {0, 4} and (out.values == 4).mean() == pytest.approx(0.25, abs=0.01)
    with pytest.raises(ConfigError, match="is unbiased already"):
        on_all_ranks(lambda transport: make(transport, "randomk:0.25:unbiased=true"), ranks=1)


@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 2, 2, 2), (1, 7)])
@pytest.mark.parametrize("spec", ["dense/raw", "topk:0.5/raw"])
def test_shapes(spec, shape):
    """Values may come in the shape of the table's rows; a table of one dimension has rows of one element."""
    width = int(np.prod(shape[1:]))
    given = [rows_of(rank, 9, width, shape[0]) for rank in range(RANKS)]

    def work(transport):
        mine = given[transport.rank]
        exchange = make(transport, spec, shape)
        out, _ = step(exchange, RowGradient(mine.indices.astype(np.int32), mine.values.reshape(-1, *shape[1:])))
        return out, arrays_of(exchange).get("residual:emb", np.zeros(int(np.prod(shape)), np.float32))

    results = on_all_ranks(work)
    residual = np.mean([state for _, state in results], axis=0).reshape(shape[0], width)
    for out, _ in results:
        check_result(out, shape)
        np.testing.assert_allclose(dense(out, shape) + residual, average([dense(g, shape) for g in given]), atol=1e-6)


@pytest.mark.parametrize("spec", [*LOSSLESS, *LOSSY])
@pytest.mark.parametrize("empty", [{0}, {1, 2}, {0, 1, 2}])
def test_ranks_without_rows(spec, empty):
    given = [rows_of(rank, 0 if rank in empty else 40) for rank in range(RANKS)]

    def work(transport):
        exchange = make(transport, spec)
        return step(exchange, given[transport.rank])

    for out, finite in on_all_ranks(work):
        check_result(out)
        assert finite and (out.indices.size > 0) == (len(empty) < RANKS)
        if spec in LOSSLESS:
            assert dense(out).tobytes() == average([dense(g) for g in given]).tobytes()


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", ["dense/raw", "topk:0.1/rice/qsgd:7", "randomk:0.1"])
def test_a_non_finite_gradient_on_one_rank(spec, special):
    """All ranks see NaN in all rows that the others name, and every memory stays."""

    def work(transport):
        exchange = make(transport, spec)
        assert step(exchange, rows_of(transport.rank))[1]
        before = arrays_of(exchange)
        bad = rows_of(5 + transport.rank)
        if transport.rank == 1:
            bad.values[-1, 7] = special
        out, finite = step(exchange, bad)
        check_result(out)
        assert not finite and out.indices.size > 1 and np.isnan(out.values).all()
        after = arrays_of(exchange)
        assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
        bad = RowGradient(np.array([7]), np.full((1, WIDTH), special, np.float32))
        out, finite = step(exchange, bad)
        assert not finite and out.indices.tolist() == [0] and np.isnan(out.values).all()
        assert step(exchange, rows_of(9))[1]
        assert all(not same_bits(before[name], arrays_of(exchange)[name]) for name in before)

    on_all_ranks(work)


def test_a_residual_waits_until_its_row_is_touched():
    def work(transport):
        exchange = make(transport, "topk:0.001/raw", (4, 2))
        step(exchange, RowGradient(np.array([0, 2]), np.array([[1, 5], [2, 3]])))
        assert arrays_of(exchange)["residual:emb"].tolist() == [1, 0, 0, 0, 2, 3, 0, 0]
        out, _ = step(exchange, RowGradient(np.array([1]), np.array([[1, 4]])))
        assert (out.indices.tolist(), out.values.tolist()) == ([1], [[0, 4]])
        assert arrays_of(exchange)["residual:emb"].tolist() == [1, 0, 1, 0, 2, 3, 0, 0]
        (tensor,) = exchange.buckets[0].tensors
        memory = exchange.memory_of(tensor)
        exchange.set_buckets([row_bucket("other", tensor, grace_ext.compressor("topk:0.001/raw"), memory)])
        out, _ = step(exchange, RowGradient(np.array([2]), np.array([[1, 1]])))
        assert (out.indices.tolist(), out.values.tolist()) == ([2], [[0, 4]])
        exchange.start(exchange.buckets[0], lambda: RowGradient(np.array([2]), np.array([[9, 9]])))
        exchange.finish(exchange.buckets[0], RowGradient())
        exchange.abort()
        assert arrays_of(exchange)["residual:emb"].tolist() == [1, 0, 1, 0, 3, 0, 0, 0]

    on_all_ranks(work, ranks=1)


@pytest.mark.parametrize("row", [-1, ROWS, 2**32, -(2**40)])
def test_a_row_outside_the_table_is_named(row):
    given = RowGradient(np.array([3, row]), np.ones((2, WIDTH)))
    with pytest.raises(ConfigError, match=f"'emb' has a row {row}; the table has 300"):
        on_all_ranks(lambda transport: step(make(transport, "dense/raw"), given), ranks=1)


def test_what_is_refused():
    with pytest.raises(ConfigError, match="2 rows and 10 values; a row of this table has 24"):
        on_all_ranks(lambda transport: step(make(transport, "dense/raw"), RowGradient(np.arange(2), np.ones(10))), ranks=1)
    with pytest.raises(ConfigError, match="too large"):
        on_all_ranks(lambda transport: make(transport, "dense/raw", (2**26, 64)), ranks=1)
    with pytest.raises(ConfigError, match="no rows"):
        on_all_ranks(lambda transport: make(transport, "dense/raw", (0, 64)), ranks=1)
    with pytest.raises(ConfigError, match="below 2\\*\\*31"):
        Rows(0)


def test_statistics_and_capture(tmp_path):
    """What an allgather of the rows as they came would have sent, and what was sent."""

    def work(transport):
        exchange = make(transport, "topk:0.1/rice/qsgd:7", capture=Capture(tmp_path, [0]))
        step(exchange, rows_of(1))
        return exchange.stats()

    for stats in on_all_ranks(work):
        assert stats["bytes_in"] == stats["compressed"]["bytes_in"] == 40 * (4 * WIDTH + 8)
        assert stats["bytes_out"] < stats["bytes_in"] / 20
        assert {"rows", "select", "index", "value", "residual", "exchange", "decode"} <= stats["seconds"].keys()
        assert stats["index_codecs"] == {"rows": 1}


def test_no_step_costs_what_the_table_costs():
    """Neither a copy of the table nor one of the residuals: 1 M x 64 would be 256 MB."""
    shape = (1_000_000, 64)

    def work(transport):
        exchange = make(transport, "topk:0.1/rice/qsgd:7", shape)
        step(exchange, rows_of(1, 50, 64, shape[0]))
        tracemalloc.start()
        step(exchange, rows_of(2, 50, 64, shape[0]))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert on_all_ranks(work, ranks=1)[0] < 2**20


def test_a_memory_without_rows_says_so():
    tensor = Tensor("emb", 8, 2, shape=(4, 2))
    with pytest.raises(ConfigError, match="'ef21' keeps no state by rows, and the gradient of 'emb' comes as rows"):
        row_bucket("bucket", tensor, grace_ext.compressor("topk:0.1"), grace_ext.memory("ef21"))


def test_rows_decay_when_they_are_touched():
    states = []
    for memory in ("residual", "residual:decay=0.5"):
        exchange = make(InProcessGroup(1).transport(0), "topk:0.1/raw", memory=memory)
        step(exchange, rows_of(1))
        (state,) = arrays_of(exchange).values()
        states.append(state)
    assert states[0].any() and states[1].tobytes() == (np.float32(0.5) * states[0]).tobytes()

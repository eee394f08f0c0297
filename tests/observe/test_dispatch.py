"""Observers see each step's bytes, seconds and norms; observing changes nothing and no failure of it reaches the training."""

import json

import numpy as np
import pytest
from support.exchanges import make, step
from support.in_process_ranks import gradient, on_all_ranks
from support.observed_runs import STEPS, ratios, run, table

from grace_ext.exchange.buckets import Tensor
from grace_ext.observe import CsvWriter, JsonlWriter, Timeline, Writer
from grace_ext.observe.capture import Capture


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_holds_what_the_statistics_and_the_memory_say(tmp_path):
    results = run(JsonlWriter(tmp_path / "new" / "log.jsonl", every=1))
    records = lines(tmp_path / "new" / "log.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))
    _, states, stats = results[0]
    for i, record in enumerate(records):
        assert record["rank"] == 0 and record["finite"] is True and record["time"] > 1.7e9
        assert record["bytes_in"] == 20_000 and record["ratio"] == 20_000 / record["bytes_out"] > 20
        assert record["residual_norm_ratio"] == pytest.approx(ratios(states, i), rel=1e-5)
        squares = [ratio**2 for ratio in record["residual_norm_ratio"].values()]
        assert min(squares) <= record["lag"] <= max(squares)
    assert records[0]["residual_norm_ratio"] == {"a": 0, "b": 0} and records[-1]["residual_norm_ratio"]["a"] > 0.5
    assert {"select", "index", "value", "exchange", "decode"} <= records[-1]["seconds"].keys()
    last = {key: records[-1][key] for key in stats["last_step"]}
    assert last == stats["last_step"]
    assert sum(record["bytes_out"] for record in records) == stats["bytes_out"]
    assert stats["residual_norm_ratio"] == records[-1]["residual_norm_ratio"]


def test_observing_changes_no_result(tmp_path):
    observe = [JsonlWriter(tmp_path / "{rank}.jsonl", every=1), Timeline(tmp_path / "{rank}.json")]
    seen = run(observe, capture=Capture(tmp_path / "capture", [2]))
    for (ours, *_), (theirs, *_) in zip(seen, run(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (tmp_path / "capture" / "2.npz").exists() and len(lines(tmp_path / "0.jsonl")) == STEPS


def test_norms_are_computed_in_the_steps_of_a_writer_only(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr("grace_ext.observe.dispatch.energy", lambda array: counted.append(1) or 1.0)
    results = run([JsonlWriter(tmp_path / "a.jsonl", every=4), CsvWriter(tmp_path / "b.csv", every=2)])
    assert [record["step"] for record in lines(tmp_path / "a.jsonl")] == [0, 4]
    assert [row["step"] for row in table(tmp_path / "b.csv")] == ["0", "2", "4"]
    assert len(counted) == 3 * 2 * 2, "three steps, two tensors, gradient and residual: on rank 0 only"
    assert results[0][2]["residual_norm_ratio"] == {"a": 1, "b": 1} and results[1][2]["residual_norm_ratio"] == {}
    counted.clear()
    run()
    assert not counted, "nobody looks"


def test_each_rank_writes_where_the_path_says_so(tmp_path):
    results = run(JsonlWriter(tmp_path / "{rank}" / "log.jsonl", every=5))
    for rank, (_, states, _) in enumerate(results):
        records = lines(tmp_path / str(rank) / "log.jsonl")
        assert [record["rank"] for record in records] == [rank, rank]
        assert records[1]["residual_norm_ratio"] == pytest.approx(ratios(states, 5, rank), rel=1e-5)


def test_a_step_that_is_not_finite_says_so_and_has_no_norms(tmp_path):
    results = run(JsonlWriter(tmp_path / "log.jsonl", every=1), poison=STEPS - 1)
    before, last = lines(tmp_path / "log.jsonl")[-2:]
    assert last["finite"] is False and last["residual_norm_ratio"] == {}
    assert results[0][2]["residual_norm_ratio"] == before["residual_norm_ratio"], "the last that was seen"


def test_a_gradient_of_zeros_gives_valid_json(tmp_path):
    def work(transport):
        exchange = make(transport, observe=JsonlWriter(tmp_path / "log.jsonl", every=1))
        step(exchange, gradient(transport.rank))
        step(exchange, np.zeros(5000, np.float32))

    on_all_ranks(work)
    assert lines(tmp_path / "log.jsonl")[1]["residual_norm_ratio"] == {"a": None, "b": None}


def test_a_memory_without_residual_has_no_ratio(tmp_path):
    for memory in ("none", "ef21"):
        run(JsonlWriter(tmp_path / f"{memory}.jsonl", every=1), memory=memory)
        assert lines(tmp_path / f"{memory}.jsonl")[-1]["residual_norm_ratio"] == {}


class Broken(Writer):
    def __init__(self, path, error, **options):
        super().__init__(path, **options)
        self.error = error

    def write(self, record):
        raise self.error


def test_what_cannot_be_written_ends_that_observer_only(tmp_path):
    (tmp_path / "file").write_text("in the way")
    observe = [
        JsonlWriter(tmp_path / "file" / "log.jsonl", every=1),
        Broken("full", OSError(28, "No space left on device"), every=1),
        Broken("bug", KeyError("a bug"), every=1),
        Timeline(tmp_path / "file" / "ours.json"),
        JsonlWriter(tmp_path / "good.jsonl", every=1),
    ]
    with pytest.warns(UserWarning, match="observing the compression in .* ends: ") as caught:
        results = run(observe)
    assert len([one for one in caught if "ends:" in str(one.message)]) == 4, "one each, not one a step"
    assert any("No space left" in str(one.message) for one in caught)
    assert len(lines(tmp_path / "good.jsonl")) == STEPS
    for (ours, *_), (theirs, *_) in zip(results, run(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_the_end_of_an_observer_is_logged(tmp_path, caplog):
    assert len(run([Broken("full", OSError(28, "No space left on device"), every=1)])) == len(run())
    assert caplog.messages == ["observing the compression in full ends: OSError: [Errno 28] No space left on device"]


def test_a_step_that_failed_is_forgotten(tmp_path):
    def work(transport):
        exchange = make(transport, observe=JsonlWriter(tmp_path / "log.jsonl", every=1))
        exchange.start(exchange.buckets[0], lambda out: np.copyto(out, gradient(1)))
        exchange.pending(exchange.buckets[0]).handle.wait()
        exchange.abort()
        step(exchange, gradient(transport.rank))
        assert exchange.buckets[0].tensors == [Tensor("a", 3000, 2), Tensor("b", 2000, 2)]

    on_all_ranks(work)
    (record,) = lines(tmp_path / "log.jsonl")
    assert record["step"] == 0 and record["bytes_in"] == 20_000

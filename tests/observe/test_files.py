"""Records as CSV and as JSON."""

import json

import pytest
from support.observed_runs import ratios, run, table

from grace_ext.observe import CsvWriter, JsonlWriter


def test_csv_has_a_row_a_step(tmp_path):
    states = run(CsvWriter(tmp_path / "log.csv", every=2))[0][1]
    rows = table(tmp_path / "log.csv")
    assert [row["step"] for row in rows] == ["0", "2", "4"]
    assert float(rows[2]["residual_norm_ratio/b"]) == pytest.approx(ratios(states, 4)["b"], rel=1e-5)
    assert float(rows[2]["bytes_out"]) > 0 and float(rows[2]["seconds/select"]) > 0 and float(rows[2]["ratio"]) > 20


def test_json_takes_what_a_low_rank_method_reports(tmp_path):
    """Numbers and truth values of numpy are none to the json module."""
    run(JsonlWriter(tmp_path / "log.jsonl", every=2), spec="powersgd:2")
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(record["step"], record["finite"]) for record in records] == [(0, True), (2, True), (4, True)]


def test_csv_goes_on_with_a_file_and_takes_new_columns(tmp_path):
    run(CsvWriter(tmp_path / "log.csv"))
    run(CsvWriter(tmp_path / "log.csv"), spec="randomk:0.1/shared/raw", communicator="allreduce")
    CsvWriter(tmp_path / "log.csv").write({"step": 7, "rank": 0, "seconds": {"new": 2.5}})
    rows = table(tmp_path / "log.csv")
    assert [row["step"] for row in rows] == ["0", "0", "7"]
    assert [bool(row["seconds/index"]) for row in rows] == [True, False, False]
    assert [row["seconds/new"] for row in rows] == ["", "", "2.5"]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]

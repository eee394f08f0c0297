"""Metrics of clients' replies: what counts, and how much."""

import logging
import math

import pytest
from support import launch

launch.skip_without("flwr")

from flwr.app import ConfigRecord, MetricRecord, RecordDict  # noqa: E402

from grace_ext.adapters._flower.metrics import comparable, read_samples  # noqa: E402

KEY = "num-examples"


def reply(**metrics) -> RecordDict:
    return RecordDict({"metrics": MetricRecord({key.replace("_", "-"): value for key, value in metrics.items()})})


@pytest.mark.parametrize("samples", [0, -1, math.nan, math.inf, [1, 2]])
def test_numbers_of_samples_that_are_none(samples):
    with pytest.raises(ValueError, match="'num-examples' of the MetricRecord is .*; allowed: a number, finite and above 0"):
        read_samples(reply(num_examples=samples), KEY)


def test_replies_without_one_metric_record():
    with pytest.raises(ValueError, match="0 MetricRecords; needed: one, with 'num-examples'"):
        read_samples(RecordDict({"metrics": ConfigRecord({KEY: 3})}), KEY)
    with pytest.raises(ValueError, match="2 MetricRecords"):
        read_samples(RecordDict({"a": MetricRecord({KEY: 3}), "b": MetricRecord({KEY: 3})}), KEY)
    assert read_samples(reply(num_examples=3), KEY) == 3


def test_each_client_counts_by_the_weight_that_it_is_given():
    contents = {0: reply(loss=1.0, num_examples=3), 4: reply(loss=2.0, num_examples=10**9)}
    chosen = comparable(contents, KEY, lambda client, claimed: min(claimed, 10.0) + client)
    assert [dict(one["metrics"]) for one in chosen] == [{"loss": 1.0, KEY: 3.0}, {"loss": 2.0, KEY: 14.0}]
    assert contents[4]["metrics"][KEY] == 10**9  # what came is not changed


def test_metrics_that_could_spoil_the_mean_are_left_out(caplog):
    good = {number: reply(loss=float(number), num_examples=1) for number in range(3)}
    bad = {
        3: reply(loss=math.nan, num_examples=1),
        4: reply(loss=1.0, num_examples=0),
        5: reply(other=1.0, num_examples=1),
        6: reply(loss=[1.0, 2.0], num_examples=1),
        7: RecordDict({}),
    }
    with caplog.at_level(logging.WARNING, "grace_ext"):
        chosen = comparable({**bad, **good}, KEY, lambda *_: 1.0)
    assert [one["metrics"]["loss"] for one in chosen] == [0.0, 1.0, 2.0]
    assert all(f"client {number}: its metrics do not count" in caplog.text for number in bad)
    assert comparable({}, KEY, lambda *_: 1.0) == []

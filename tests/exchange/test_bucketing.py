"""Which tensors share a bucket."""

import cProfile
import math
import pstats

import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.bucketing import build_buckets, group_tensors
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import Rules
from grace_ext.transport import InProcessGroup


def test_buckets_respect_order_size_compressor_device_and_groups():
    dense, sparse = grace_ext.compressor("dense/raw"), grace_ext.compressor("topk:0.1")
    tensors = [
        Tensor("big", 5000, 2),
        Tensor("x", 600, 2),
        Tensor("bias", 10, 1),
        Tensor("y", 600, 2),
        Tensor("gpu", 600, 2, "cuda:0"),
        Tensor("z", 600, 2),
    ]

    def names(groups=None, limit=4 * 1300):
        lists = group_tensors(tensors, lambda t: dense if t.ndim == 1 else sparse, limit, groups)
        return sorted([t.name for t in members] for members in lists)

    assert names() == [["bias"], ["big"], ["gpu"], ["x", "y"], ["z"]]
    assert names(limit=1) == [["bias"], ["big"], ["gpu"], ["x"], ["y"], ["z"]]
    assert names(groups=[["big", "z"]], limit=1) == [["bias"], ["big", "z"], ["gpu"], ["x"], ["y"]]


def test_a_layout_keeps_apart_what_has_no_place_in_one_bucket():
    """Parts, specs, memories and tables."""
    exchange = Exchange(InProcessGroup(1).transport(0), {"*.kept": "residual", "*": "none"}, 1.0)
    parts = [
        [Tensor(name, 5000, 2, shape=(50, 100)) for name in names]
        for names in (["a", "a.kept", "table", "b"], ["c", "sparse", "d"])
    ]
    rules = Rules("topk:0.1", {"b": "dense/fp16", "sparse": "dense/raw"})
    buckets = build_buckets(exchange, parts, {"table", "sparse"}, rules, parse_stage("communicator", "allgather"), "first")
    found = {
        bucket.name: ([t.name for t in bucket.tensors], str(bucket.compressor), bucket.memory.name) for bucket in buckets
    }
    assert found == {
        "first.bucket0": (["a"], "topk:0.1/auto/raw", "none"),
        "first.bucket1": (["a.kept"], "topk:0.1/auto/raw", "residual"),
        "first.bucket2": (["b"], "dense/auto/fp16", "none"),
        "first.bucket3": (["c", "d"], "topk:0.1/auto/raw", "none"),
        "first.rows0": (["table"], "topk:0.1/rows:100/raw", "none"),
        "first.rows1": (["sparse"], "dense/rows:100/raw", "none"),
    }


def test_tables_have_no_means_over_senders():
    exchange = Exchange(InProcessGroup(1).transport(0), "residual", 1.0)
    parts, senders = (
        [[Tensor(name, 5000, 2, shape=(50, 100)) for name in ("a", "table")]],
        parse_stage("communicator", "senders"),
    )
    assert len(build_buckets(exchange, parts, set(), Rules("topk:0.1"), senders, "p")) == 1
    with pytest.raises(
        ConfigError, match="'senders' has no means of gradients that come as rows.*use communicator allgather"
    ):
        build_buckets(exchange, parts, {"table"}, Rules("topk:0.1"), senders, "p")


@pytest.mark.parametrize("bucket_bytes", [math.inf, 1000])
def test_building_takes_work_in_proportion_to_the_number_of_tensors(bucket_bytes):
    """Counted in calls of functions, which do not depend on the machine. In one bucket, or two tensors in each."""

    def calls(count):
        exchange = Exchange(InProcessGroup(1).transport(0), "residual", 1.0)
        tensors = [Tensor(f"t{i}", 100, 2, shape=(10, 10)) for i in range(count)]
        profile = cProfile.Profile()
        profile.enable()
        buckets = build_buckets(
            exchange, [tensors], set(), Rules("topk:0.1"), parse_stage("communicator", "allgather"), "p", bucket_bytes
        )
        profile.disable()
        assert len(buckets) == (1 if bucket_bytes == math.inf else count // 2)
        return pstats.Stats(profile).total_calls

    calls(10)
    assert calls(800) < 2.1 * calls(400)

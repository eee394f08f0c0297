"""Our phases as a Chrome trace, and merged with one as Horovod writes it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.in_process_ranks import gradient, on_all_ranks

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.observe import Timeline, merge_timelines
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import Transport
from grace_ext.transport.tracing import TracingTransport

# What horovod/common/timeline.cc writes, for two tensors and one collective of each.
HOROVOD = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":5000000}},
{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allgather.grace_ext.0.bucket10"}},
{"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
{"ph": "B", "name": "ALLGATHER", "ts": 100, "pid": 1},{"ph": "E", "ts": 130, "pid": 1, "args": {"dtype": "uint8"}},\
{"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "allgather.grace_ext.0.bucket1"}},
{"name": "process_sort_index", "ph": "M", "pid": 2, "args": {"sort_index": 2}},
{"ph": "B", "name": "ALLGATHER", "ts": 140, "pid": 2},{"ph": "E", "ts": 150, "pid": 2, "args": {"dtype": "uint8"}}]"""


def run(timeline, spec="topk:0.1/rice/qsgd:7", steps=3, communicator="allgather"):
    def work(transport):
        exchange = Exchange(transport, "residual", 0.5, observe=timeline)
        exchange.set_buckets(
            [
                exchange.bucket(
                    "bucket",
                    [Tensor("a", 5000, 2, shape=(50, 100))],
                    grace_ext.compressor(spec),
                    parse_stage("communicator", communicator),
                )
            ]
        )
        for i in range(steps):
            exchange.start(exchange.buckets[0], lambda out, i=i: np.copyto(out, gradient(i)))
            exchange.advance()
            exchange.finish(exchange.buckets[0], np.empty(5000, np.float32))
            exchange.end_step()

    on_all_ranks(work)


def phases(path, step):
    return {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in json.loads(path.read_text())
        if event["ph"] == "X" and event["args"]["step"] == step
    }


def test_phases_follow_each_other(tmp_path):
    run(Timeline(tmp_path / "ours.json", steps=range(1, 3)))
    assert not phases(tmp_path / "ours.json", 0)
    for i in (1, 2):
        found = phases(tmp_path / "ours.json", i)
        chain = [found[name] for name in ("select", "index", "value", "container", "residual", "exchange", "decode")]
        assert all(one[1] <= other[0] + 0.01 for one, other in zip(chain, chain[1:], strict=False)), found
        assert all(start <= end for start, end in found.values())
        assert found["encode"][0] <= found["select"][0] + 0.01 and found["residual"][1] <= found["encode"][1] + 0.01
    assert phases(tmp_path / "ours.json", 1)["decode"][1] <= phases(tmp_path / "ours.json", 2)["encode"][0]
    names = [
        event["args"].get("name")
        for event in json.loads((tmp_path / "ours.json").read_text())
        if event["name"] == "process_name"
    ]
    assert names == [None, "bucket"]


def test_two_dependent_collectives(tmp_path):
    run(Timeline(tmp_path / "ours.json"), "powersgd:2", steps=1)
    events = [event for event in json.loads((tmp_path / "ours.json").read_text()) if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["encode", "factor", "exchange", "factor", "exchange", "decode"]
    ends = [event["ts"] for event in events[1:]]
    assert ends == sorted(ends)


def test_phases_of_what_is_sharded(tmp_path):
    run(Timeline(tmp_path / "ours.json"), steps=1, communicator="sharded")
    events = [event for event in json.loads((tmp_path / "ours.json").read_text()) if event["ph"] == "X"]
    stages = ["select", "index", "value", "container", "residual"]
    assert [event["name"] for event in events] == ["encode", *stages, "exchange", "decode", *stages, "exchange", "decode"]
    starts = [event["ts"] for event in events[1:]]
    assert starts == sorted(starts)


def test_merged_on_one_clock_and_in_the_rows_of_the_collective(tmp_path):
    (tmp_path / "horovod.json").write_text(HOROVOD)
    ours = Timeline(tmp_path / "ours.json")
    ours._started, ours._origin = 5_000_040, 1.0  # 40 us after Horovod's
    ours.add(0, "grace_ext.0.bucket1", 7, [("encode", 1.00001, 1.00002)])
    ours.add(0, "grace_ext.1.bucket1", 7, [("encode", 1.00003, 1.00004)])
    done = subprocess.run(
        [sys.executable, "-m", "grace_ext", "timeline", "horovod.json", "ours.json", "-o", "horovod.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "2 phases" in done.stdout, done
    merged = json.loads((tmp_path / "horovod.json").read_text())
    theirs = json.loads(HOROVOD)
    assert merged[: len(theirs)] == theirs
    first, second = (event for event in merged if event.get("name") == "encode")
    assert (first["pid"], first["ts"], first["dur"]) == (2, 50, 10)
    assert (second["pid"], second["ts"]) == (3, 70)
    assert {
        event["pid"]: event["args"]["name"]
        for event in merged
        if event.get("name") == "process_name" and "name" in event["args"]
    }[3] == "grace_ext.1.bucket1"


def test_a_trace_that_was_cut_off_between_events_is_merged(tmp_path):
    (tmp_path / "horovod.json").write_text(HOROVOD[: HOROVOD.index('{"ph": "E", "ts": 150')])
    run(Timeline(tmp_path / "ours.json"), steps=1)
    assert merge_timelines(tmp_path / "horovod.json", tmp_path / "ours.json", tmp_path / "merged.json") > 5
    assert json.loads((tmp_path / "merged.json").read_text())


@pytest.mark.parametrize(
    "text, message",
    [
        ("{}", "not a Chrome trace"),
        ("[", "does not say when"),
        ("[1]", "list of events"),
        ("hello", "not a Chrome trace"),
        ('[{"ph": "B"}]', "does not say when it began"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / "horovod.json").write_text(text)
    run(Timeline(tmp_path / "ours.json"), steps=1)
    with pytest.raises(ConfigError, match=message):
        merge_timelines(tmp_path / "horovod.json", tmp_path / "ours.json", tmp_path / "merged.json")
    assert not (tmp_path / "merged.json").exists()


def test_tracing_forwards_every_kind_of_collective():
    """One that fell back on another would leave the other ranks, which are not traced, in the one they were told of."""

    class Named(Transport):
        rank, size, hosts = 0, 2, (0, 0)

    collectives = ("allgather", "allreduce", "alltoall", "broadcast")
    for name in collectives:
        setattr(Named, name, lambda self, *_, name=name: name)
    payload, tracing = np.empty(0, np.uint8), TracingTransport(Named())
    assert (
        tracing.allgather("a", payload),
        tracing.allreduce("a", payload),
        tracing.alltoall("a", payload, [0, 0]),
        tracing.broadcast("a", payload, 0),
    ) == collectives
    assert tracing.started_at is not None

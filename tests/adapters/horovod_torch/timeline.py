"""A job that trains with Horovod's timeline and ours, merges them and looks at the order of events: timeline.py FOLDER.

It is one of its own: where HOROVOD_TIMELINE is set, Horovod has a thread that never rests in each rank."""

import json
import os
import sys
import time
from pathlib import Path

os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # so that it can be started

import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402
from harness import compressed, train  # noqa: E402

from grace_ext.observe import Timeline, merge_timelines  # noqa: E402


def check_order(events: list[dict], buckets: list[str]) -> None:
    """The phases of each bucket, in three steps, are where Horovod's allgather of it lies between."""
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name" and "name" in event["args"]
    }
    assert buckets
    for bucket in buckets:
        (pid,) = (pid for pid, name in names.items() if name.endswith(f".{bucket}"))
        # From the second step on it goes with the float32 bucket.
        collectives = [pid, *(fused for fused, name in names.items() if name.endswith(".fused"))]
        assert all(names[one].startswith("allgather.") for one in collectives), names
        sent = sorted(
            event["ts"] for event in events if event.get("pid") in collectives and event.get("name") == "ALLGATHER"
        )
        phases = {
            name: [event for event in events if event.get("pid") == pid and event.get("name") == name]
            for name in ("encode", "select", "index", "value", "exchange", "decode")
        }
        assert len(sent) == 3 and all(len(found) == 3 for found in phases.values()), (sent, phases)
        assert [event["args"]["step"] for event in phases["encode"]] == [0, 1, 2]
        # Microseconds of two clocks, which were read one after the other: one shift, of less than a second, explains the
        # order of all events.
        before = max(event["ts"] + event["dur"] - at for event, at in zip(phases["encode"], sent, strict=True))
        after = min(
            event["ts"] - at
            for event, at in zip([*phases["decode"], *phases["encode"][1:]], [*sent, *sent[:-1]], strict=True)
        )
        assert before <= after and before < 1e6 and after > -1e6, (before, after)


hvd.init()
torch.set_num_threads(1)
theirs, ours = Path(sys.argv[1], "horovod.json"), Path(sys.argv[1], "ours.json")
hvd.start_timeline(str(theirs), mark_cycles=False)
_, optimizer, _ = train(compressed(observe=Timeline(ours)), steps=3)
hvd.stop_timeline()
if hvd.rank() == 0:
    while not (theirs.exists() and theirs.read_text().endswith("]")):  # Horovod's writer is a thread of its own
        time.sleep(0.05)
    merge_timelines(theirs, ours, theirs)
    check_order(
        json.loads(theirs.read_text()),
        [bucket.name for bucket in optimizer._grace.exchange.buckets if not bucket.compressor.exact],
    )
hvd.allreduce(torch.zeros(1), name="end")
hvd.shutdown()

"""The phases of each bucket as a Chrome trace, and that trace beside Horovod's.

Horovod's trace (HOROVOD_TIMELINE, horovod/common/timeline.cc) models each collective as a process, counts microseconds from
its start, and says in its first event when that was, in microseconds since the epoch. Ours does the same, so that both can
be drawn on one axis.
"""

import json
import os
import re
import time
from collections.abc import Container

from .._util.files import atomic_write
from ..errors import ConfigError
from .base import Observer

_START = "start_time_since_epoch_in_micros"
_THREAD = 1  # any number: Horovod's events have none
#: The order of the stages: only the duration of each is known.
_ENCODING = ("rows", "transform", "factor", "select", "index", "value", "container", "residual")
_FINISHING = ("exchange", "factor", "decode")


class Timeline(Observer):
    """Writes the phases of each bucket.

    The phases are encode, and within it select, index, value, ...; exchange, which is the time spent waiting; and decode.
    The file is valid at every time; `merge_timelines` merges it into Horovod's.

    Args:
        path: See Observer.
        steps: The steps to draw, such as range(100, 120); None for all.
    """

    def __init__(self, path: str | os.PathLike, steps: Container[int] | None = None):
        super().__init__(path)
        self.steps = steps
        self._origin = time.perf_counter()
        self._started = round(1e6 * time.time())
        self._pids: dict[int, dict[str, int]] = {}  # by rank, which elastic training may change, and by bucket

    def wants(self, step: int) -> bool:
        """Say whether a step is drawn.

        Args:
            step: Number of the step.

        Returns:
            Whether it is.
        """
        return not self.ended and (self.steps is None or step in self.steps)

    def add(self, rank: int, bucket: str, step: int, phases: list[tuple[str, float, float]]) -> None:
        """Append phases of a bucket to the file.

        Args:
            rank: Number of this rank.
            bucket: Name of the bucket.
            step: Number of the step.
            phases: (name, start, end) of each, in seconds of time.perf_counter.
        """
        events, goes_on = [], rank in self._pids
        if not goes_on:
            events.append({"ph": "M", "name": "process_name", "pid": 0, "args": {_START: self._started}})
        pids = self._pids.setdefault(rank, {})
        if bucket not in pids:
            pids[bucket] = len(pids) + 1
            events += [_named("process_name", pids[bucket], bucket), _named("thread_name", pids[bucket])]
        events += [
            {
                "ph": "X",
                "name": name,
                "ts": round(1e6 * (start - self._origin), 3),
                "dur": round(1e6 * (end - start), 3),
                "pid": pids[bucket],
                "tid": _THREAD,
                "args": {"step": step},
            }
            for name, start, end in phases
        ]
        text = ",\n".join(map(json.dumps, events)).encode() + b"\n]"
        with open(self.path_of(rank), "rb+" if goes_on else "wb") as file:
            if goes_on:
                file.seek(-2, os.SEEK_END)  # overwrite the end of the list
            file.write((b",\n" if goes_on else b"[\n") + text)


def _named(kind: str, pid: int, name: str = "grace_ext") -> dict:
    return {"ph": "M", "name": kind, "pid": pid, "tid": _THREAD, "args": {"name": name}}


def encoding_phases(seconds: dict[str, float], sent: float) -> list[tuple[str, float, float]]:
    """Compute the phases of what a bucket did before it was sent: "encode", and its stages within.

    Args:
        seconds: Seconds of each stage.
        sent: When the bucket was sent, in seconds of time.perf_counter.

    Returns:
        (name, start, end) of each phase.
    """
    stages = _back_from(sent, seconds, _ENCODING)
    return [("encode", stages[0][1], sent), *stages] if stages else []


def finishing_phases(seconds: dict[str, float], before: dict[str, float], end: float) -> list[tuple[str, float, float]]:
    """Compute the phases of what a bucket did since it was advanced or finished.

    Args:
        seconds: Seconds of each stage now.
        before: Seconds of each stage before.
        end: When the last phase ended, in seconds of time.perf_counter.

    Returns:
        (name, start, end) of each phase.
    """
    grown = {stage: taken - before.get(stage, 0.0) for stage, taken in seconds.items()}
    return _back_from(end, {stage: taken for stage, taken in grown.items() if taken > 0}, _FINISHING)


def _back_from(end: float, seconds: dict[str, float], order: tuple[str, ...]) -> list[tuple[str, float, float]]:
    phases = []
    known = [stage for stage in order if stage in seconds]
    for stage in reversed([*known, *(stage for stage in seconds if stage not in order)]):
        phases.append((stage, end - seconds[stage], end))
        end -= seconds[stage]
    return phases[::-1]


def merge_timelines(horovod: str | os.PathLike, ours: str | os.PathLike, merged: str | os.PathLike) -> int:
    """Write Horovod's trace with our phases in it, on Horovod's clock and in the rows of the collectives they belong to.

    A bucket that Horovod's trace does not have gets rows of its own.

    Args:
        horovod: Path of Horovod's trace.
        ours: Path of the trace that a Timeline wrote.
        merged: Path to write to; may be one of the two.

    Returns:
        The number of phases.

    Raises:
        ConfigError: A file is not such a trace.
    """
    theirs, own = _load(horovod), _load(ours)
    shift = _start(own, ours) - _start(theirs, horovod)
    pids = {
        event["args"]["name"]: event["pid"]
        for event in theirs
        if event.get("name") == "process_name" and "name" in event["args"]
    }
    free = 1 + max(event.get("pid", 0) for event in theirs)
    moved, count = {}, 0
    for event in own:
        if event["pid"] == 0:  # says when our trace began; in the merged file Horovod's event counts for both
            continue
        if event["name"] == "process_name":
            found = _collective(event["args"]["name"], pids)
            moved[event["pid"]] = free if found is None else found
            if found is not None:
                continue
            free += 1
        event["pid"] = moved[event["pid"]]
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift, 3)
            count += 1
        theirs.append(event)
    with atomic_write(merged) as part:
        part.write_text("[\n" + ",\n".join(map(json.dumps, theirs)) + "\n]\n", encoding="utf-8")
    return count


def _collective(bucket: str, pids: dict[str, int]) -> int | None:
    """Return the first collective of a bucket.

    Its name is "allgather.grace_ext.0.bucket1", "grace_ext.0.bucket1", or, for a bucket of two collectives, "....bucket1.p".
    """
    pattern = re.compile(rf"(^|\W|_){re.escape(bucket)}(\W|$)")
    return next((pid for name, pid in pids.items() if pattern.search(name)), None)


def _load(path: str | os.PathLike) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        text = file.read().rstrip().rstrip(",")
    try:  # the trace of a program that was killed lacks the end of the list
        events = json.loads(text if text.endswith("]") else text + "]")
    except ValueError as error:
        raise ConfigError(f"{path} is not a Chrome trace: {error}") from None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ConfigError(f"{path} is not a Chrome trace: a list of events was expected")
    return events


def _start(events: list[dict], path: str | os.PathLike) -> float:
    for event in events:
        if _START in event.get("args", {}):
            return event["args"][_START]
    raise ConfigError(f"{path} does not say when it began; it has no event with {_START}")

"""What a user sees, and when, if a host crashes, a link becomes slow or a rank stalls; writes docs/benchmarks.md.

    python benchmarks/faults.py

It can run in parts: --faults crash silent --launchers mpirun. Measurements are kept in build/benchmarks/faults, and the page
is written from all of them. Needs root, for hosts on this machine (mpirun/hosts). About 10 minutes.
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

from _hosts import Hosts, Job, JobFailed, wait_until
from _lib import ROOT, as_markdown, machine
from _page import write_section

WORKER = os.path.join(ROOT, "benchmarks", "_faults_worker.py")
RANKS = 3  # the fault affects the host of the last rank
FIRST = 20  # steps before the fault
STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
KEEPALIVE = {
    "PRTE_MCA_oob_tcp_keepalive_time": "10",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "5",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}
LAUNCHERS = ("horovodrun --gloo", "mpirun")
#: How a launcher reports a fault.
NOTABLE = re.compile("lost communication|failed to report|exited on signal|exit with status|[Ss]tall")
FOR_GOOD = 120  # seconds to wait for an end


@dataclasses.dataclass
class Fault:
    """A fault on the last rank's host.

    begin, end: subcommands of mpirun/hosts; "STOP" and "CONT": signals to the rank. end None: the fault lasts.
    """

    title: str
    begin: tuple
    end: tuple | None = None
    env: dict = dataclasses.field(default_factory=dict)
    lasts: float = 10


FAULTS = {
    "crash": Fault("host3 crashes", ("crash", RANKS)),
    "silent": Fault("host3 crashes silently", ("crash", "--silent", RANKS), env=KEEPALIVE),
    "link": Fault("host3's link falls to 1 Mbit/s for 10 s", ("rate", "1mbit", RANKS), ("rate", "1gbit", RANKS)),
    "pause": Fault("the rank on host3 is stopped for 10 s", ("STOP",), ("CONT",)),
    "stall": Fault("the rank on host3 is stopped for good", ("STOP",), env=STALL),
}


@dataclasses.dataclass
class Seen:
    """What was observed.

    ended: seconds until each other rank had ended, None where it had not. errors: what each raised. said: what the launcher
    printed. steps: median seconds of a step before, during and after the fault; longest: of those that ended after it began.
    """

    status: int | None
    ended: list[float | None]
    errors: list[str]
    said: str
    steps: list[float | None]
    longest: float | None


def run(up: Hosts, launcher: str, fault: Fault, folder: str) -> Seen:
    """Run a job, and disturb it. folder: for the ranks' files. Raises JobFailed if the job does not begin to train."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    job = Job(up, launcher, RANKS, [WORKER, folder], fault.env)
    try:
        if not wait_until(lambda: job.processes[0].poll() is not None or trains(folder), 300) or not trains(folder):
            raise JobFailed(f"it does not train:\n{job.stop()[-4000:]}")
        began = time.time()
        change(up, fault.begin, folder)
        ended, until = [None] * (RANKS - 1), None
        if fault.end:
            time.sleep(fault.lasts)
            change(up, fault.end, folder)
            until = time.time()
            time.sleep(fault.lasts)
        else:
            wait_until(lambda: all_ended(up, ended, began), FOR_GOOD)
            wait_until(lambda: job.processes[0].poll() is not None, 30)
        status = job.processes[0].poll()
    finally:
        output = job.stop()
        for host in range(1, RANKS + 1):  # nothing of the job is left
            up("crash", host, check=False)
            up("boot", host)
        up("rate", "1gbit")
    return Seen(status, ended, errors(folder), notable(output), *durations(folder, began, until))


def trains(folder: str) -> bool:
    return all(len(steps(folder, rank)) >= FIRST for rank in range(RANKS))


def steps(folder: str, rank: int) -> list[list[float]]:
    """Read [when a step ended, how long it took] of each step."""
    try:
        with open(os.path.join(folder, f"rank{rank}.steps")) as file:
            return [[float(number) for number in line.split()] for line in file if line.endswith("\n")]
    except OSError:
        return []


def change(up: Hosts, what: tuple, folder: str) -> None:
    if what[0] in ("STOP", "CONT"):
        with open(os.path.join(folder, f"rank{RANKS - 1}.pid")) as file:
            up("exec", RANKS, "kill", f"-{what[0]}", file.read().strip())
    else:
        up(*what)


def all_ended(up: Hosts, ended: list, began: float) -> bool:
    for index in range(RANKS - 1):
        if ended[index] is None and os.path.basename(WORKER) not in up("exec", index + 1, "ps", "-A", "-o", "args="):
            ended[index] = time.time() - began
    return None not in ended


def errors(folder: str) -> list[str]:
    found = []
    for rank in range(RANKS - 1):
        path = os.path.join(folder, f"rank{rank}.error")
        if os.path.exists(path):
            with open(path) as file:
                found.append(json.load(file)["error"])
    return found


def notable(output: str) -> str:
    """Return the first such line and the one after it, on which Open MPI's sentences continue."""
    lines = [re.sub(r"^\[[\d,]+\]<std\w+>: ?", "", line).strip() for line in output.splitlines()]
    return next((" ".join(lines[at : at + 2]) for at, line in enumerate(lines) if NOTABLE.search(line)), "")


def durations(folder: str, began: float, until: float | None) -> tuple[list[float | None], float | None]:
    measured = steps(folder, 0)
    before = [seconds for at, seconds in measured[FIRST // 2 :] if at < began]
    during = [seconds for at, seconds in measured if at >= began and (until is None or at - seconds < until)]
    after = [seconds for at, seconds in measured if until is not None and at - seconds >= until]
    medians = [statistics.median(part) if part else None for part in (before, during, after)]
    return medians, max(during + after, default=None)


def row(fault: Fault, launcher: str, seen: Seen) -> list[str]:
    before, during, after = (f"{1000 * value:.0f} ms" if value else "none" for value in seen.steps)
    if fault.end:
        longest = f"{seen.longest:.1f} s" if seen.longest else "none"
        seconds = f"a step took {before} before, {during} during the fault, {after} after; the longest {longest}"
        return [
            fault.title,
            launcher,
            f"{'training continues' if seen.status is None else 'the job ends'}; {seconds}",
            "",
            "" if seen.status is None else str(seen.status),
        ]
    texts = [f"ranks raise `{text}`" for text in dict.fromkeys(map(abridged, seen.errors))]
    if seen.said:
        texts.append(f"the launcher's output: `{abridged(seen.said)}`")
    settings = ", ".join(
        f"`{name}={value}`" for name, value in fault.env.items() if name.startswith("PRTE") == (launcher == "mpirun")
    )
    ended = ", ".join(f"{seconds:.1f}" if seconds is not None else f"not within {FOR_GOOD}" for seconds in seen.ended)
    return [
        fault.title,
        launcher + (f", {settings}" if settings else ""),
        "; ".join(texts) or "nothing",
        ended,
        "still running" if seen.status is None else str(seen.status),
    ]


def abridged(text: str, most: int = 160) -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "/").replace("`", "'")
    text = re.sub(r"/\S*/third_party/", "", text)  # where Horovod was built
    return text if len(text) <= most else text[: most - 1] + "…"


def document(raw: str) -> str:
    rows, dates = [], set()
    for name, fault in FAULTS.items():
        for launcher in LAUNCHERS:
            path = path_of(raw, name, launcher)
            if os.path.exists(path):
                with open(path) as file:
                    saved = json.load(file)
                rows.append(row(fault, launcher, Seen(**saved["seen"])))
                dates.add(saved["date"])
    return (
        "\n\n".join(
            [
                f"Written by `benchmarks/faults.py`; do not edit. {RANKS} ranks on {RANKS} hosts (`mpirun/hosts`) with "
                "links of 1 Gbit/s train a network of 0.8 M parameters with grace_ext's default spec. Seconds are counted "
                "from the fault until the process of each other rank (on host1 and host2) has ended. The status is that "
                "of the launcher.",
                as_markdown([["fault", "launcher, settings", "observed", "seconds", "status"], *rows]).replace(
                    "|---|--:|--:|--:|--:|", "|---|---|---|--:|--:|"
                ),
                f"Measured on {', '.join(sorted(dates))} on {machine()}, by `python benchmarks/faults.py`.",
            ]
        )
        + "\n"
    )


def path_of(raw: str, name: str, launcher: str) -> str:
    return os.path.join(raw, f"{name}_{launcher.replace(' ', '')}.json")


def measure(up: Hosts, name: str, launcher: str, raw: str) -> bool:
    """Measure a fault, a second time if the job doesn't start, because mpirun occasionally hangs (docs/cluster.md)."""
    for attempt in (1, 2):
        try:
            seen = run(up, launcher, FAULTS[name], os.path.join(raw, "ranks"))
        except (JobFailed, subprocess.SubprocessError) as error:
            say(f"{name}, {launcher}, attempt {attempt}: {error}")
            continue
        with open(path_of(raw, name, launcher), "w") as file:
            json.dump({"date": datetime.date.today().isoformat(), "seen": dataclasses.asdict(seen)}, file)
        say(" | ".join(row(FAULTS[name], launcher, seen)))
        return True
    return False


def say(text: str) -> None:
    print(f"[faults] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md")
    parser.add_argument("--raw", default=os.path.join(ROOT, "build", "benchmarks", "faults"), help="folder of measurements")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--name", default="bench-faults", help="name of the set of hosts (mpirun/hosts --name)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    started, raw = time.monotonic(), os.path.abspath(args.raw)
    os.makedirs(raw, exist_ok=True)
    with Hosts(args.name, RANKS, "1gbit") as up:
        failed = [
            f"{name}, {launcher}"
            for name in args.faults
            for launcher in args.launchers
            if not measure(up, name, launcher, raw)
        ]
    path = write_section(args.out, "faults", "Faults", document(raw))
    say(f"written: {path}; all in {(time.monotonic() - started) / 60:.1f} minutes")
    for what in failed:
        say(f"failed: {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

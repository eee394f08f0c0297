"""Do the tests pass at any speed of the machine? Repeats `make test` while another process keeps all cores busy.

    python benchmarks/busy.py --runs 5
    python benchmarks/busy.py --runs 5 --beside "python benchmarks/mutations.py run --suite test --jobs 2 --resume"

Writes its section of docs/reliability.md, also when a run fails. The output of each run is in --logs.
"""

import argparse
import datetime
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import threading
import time

from _lib import ROOT, as_markdown, machine
from _page import commit, write_section

COUNTS = re.compile(r"^=+ (.*\bpassed\b.*|.*\bfailed\b.*|.*\berrors?\b.*) in [\d.]+s")


def spin():
    while True:
        pass


class Busy:
    """Keeps all cores busy inside `with`.

    The command, if there is one, does so until it ends; then, or without one, as many processes as there are cores, none of
    which ever waits.
    """

    def __init__(self, command: str | None, log: str):
        self._command, self._log, self._end = command, log, threading.Event()
        self._thread = threading.Thread(target=self._keep_busy)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def _keep_busy(self):
        if self._command:
            with open(self._log, "w") as file:
                process = subprocess.Popen(
                    shlex.split(self._command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )
                while process.poll() is None and not self._end.wait(1):
                    pass
                process.terminate()
                process.wait()
        processes = [multiprocessing.Process(target=spin, daemon=True) for _ in os.sched_getaffinity(0)]
        for process in processes:
            process.start()
        self._end.wait()
        for process in processes:
            process.terminate()
            process.join()


def run(target: str, log: str) -> tuple[int, float, str]:
    """Return the exit status, the minutes and the counts in pytest's last line."""
    began, counts = time.monotonic(), "no result"
    with open(log, "w") as file:
        status = subprocess.run(["make", target], cwd=ROOT, stdout=file, stderr=file, stdin=subprocess.DEVNULL).returncode
    with open(log) as file:
        for line in file:
            found = COUNTS.match(line)
            counts = found[1] if found else counts
    return status, (time.monotonic() - began) / 60, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--target", default="test", choices=("test-quick", "test", "test-all"))
    parser.add_argument(
        "--beside",
        metavar="COMMAND",
        help="what keeps the cores busy while it runs; then, and "
        "without it, as many processes as cores do, which never wait",
    )
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of reliability.md")
    parser.add_argument("--logs", default=os.path.join(ROOT, "build", "busy"))
    args = parser.parse_args()
    os.makedirs(args.logs, exist_ok=True)
    tested, rows, failed = commit(), [["run", "began", "result", "minutes"]], 0
    cores = len(os.sched_getaffinity(0))
    load = f"`{args.beside}`, and when that has ended " if args.beside else ""
    with Busy(args.beside, os.path.join(args.logs, "beside.log")):
        for number in range(1, args.runs + 1):
            began = datetime.datetime.now()
            status, minutes, counts = run(args.target, os.path.join(args.logs, f"{args.target}-{number}.log"))
            failed += status != 0
            rows.append(
                [str(number), f"{began:%Y-%m-%d %H:%M}", counts if status == 0 else f"**{counts}**", f"{minutes:.1f}"]
            )
            print(f"[{number}/{args.runs}] {counts}, status {status}, {minutes:.1f} minutes", flush=True)
            text = (
                f"{as_markdown(rows)}\n\n`make {args.target}` of commit {tested}, beside {load}{cores} "
                f"processes that never rest, on {machine()}; by `python benchmarks/busy.py --runs {args.runs}`.\n"
            )
            write_section(args.out, "busy", "On a busy machine", text, "reliability.md")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

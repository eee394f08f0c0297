"""Checks run in every rank of a job; a worker script runs those that it is asked for and writes what each came to."""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from unittest import mock

from grace_ext.adapters._horovod.exits import shuts_down

PATIENCE = 120  # seconds that a rank in which a check failed waits for the others to end it
CHECKS = {}
_thorough = True


def check(function):
    """Decorator. Name all collectives of a check: Horovod pairs those without a name by counts, which checks of join and of
    process sets leave different between ranks."""
    CHECKS[function.__name__] = function
    return function


#: Of what Horovod's controllers, the transports or the number of ranks do; other checks run under one launcher, but for
#: `make test-all`.
check_under_every_launcher = check


def covering(cases) -> list[tuple]:
    """All of these tuples in `make test-all`, under one launcher; else as few as have each value of each position at least
    once."""
    cases = list(cases)
    if _thorough:
        return cases
    chosen, missing = [], {member for case in cases for member in enumerate(case)}
    while missing:
        case = max(cases, key=lambda case: len(missing.intersection(enumerate(case))))
        chosen.append(case)
        missing.difference_update(enumerate(case))
    return chosen


def shutdown_is_seen(hvd):
    """Whether the watchdog knows of a call of this framework's hvd.shutdown(), which shuts nothing down here."""
    shutdown, seen = hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_shutdown, []
    with mock.patch.object(shutdown, "plain", lambda: seen.append(shuts_down())):
        hvd.shutdown()
    return seen == [True] and not shuts_down()


@contextlib.contextmanager
def raises(error, text):
    try:
        yield
    except error as caught:
        assert text in str(caught), f"{caught} does not say {text!r}"
    else:
        raise AssertionError(f"no {error.__name__} with {text!r}")


def run_checks(folder: str, rank: int, ranks: int, count) -> None:
    """Run the checks that FOLDER/checks.json names. count(name, number) -> the sum of the number over ranks."""
    global _thorough
    results, seconds, folder = {}, {}, Path(folder)
    wanted = json.loads((folder / "checks.json").read_text())
    _thorough = wanted["thorough"]
    for name in wanted["checks"]:
        began = time.monotonic()
        try:
            CHECKS[name]()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
        seconds[name] = time.monotonic() - began
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
        (folder / f"seconds{rank}.json").write_text(json.dumps(seconds))
        # A rank that failed alone would leave the others waiting, in the next check, or in this one for ever: then it goes.
        leave = threading.Timer(PATIENCE, os._exit, [1])
        if results[name] != "ok":
            leave.start()
        failed = count(f"failed.{name}", int(results[name] != "ok"))
        leave.cancel()
        if 0 < failed < ranks:
            sys.exit(f"{name} failed on some ranks only")

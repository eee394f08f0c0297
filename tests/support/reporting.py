"""What the end of a test run says: the slowest tests, how long set-up took; and the page that keeps the last run of all."""

import datetime
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SET_UP = ROOT / ".venv" / "grace_ext-setup-times.json"
SLOWEST = 20


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section(f"slowest {SLOWEST}")
    for seconds, what in slowest(terminalreporter):
        terminalreporter.write_line(f"{seconds:7.1f} s  {what}")
    if SET_UP.exists():
        done = json.loads(SET_UP.read_text())
        steps = ", ".join(f"{name} {seconds:.0f}" for name, seconds in done["steps"].items())
        terminalreporter.write_line(f"set-up took {done['seconds']:.0f} s when it was last needed: {steps}")


def slowest(terminalreporter) -> list[tuple[float, str]]:
    """Of all phases of tests, and of checks inside ranks, which count as the set-up of their job's first test."""
    rows = []
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            rows.append((report.duration, f"{report.when:8} {report.nodeid}"))
            rows += [
                (seconds, f"in ranks {report.nodeid}")
                for name, seconds in report.user_properties
                if name == "seconds" and report.when == "call"
            ]
    return sorted((row for row in rows if row[0] > 0.1), reverse=True)[:SLOWEST]


class Record:
    """Keeps date, commit, machine, counts and minutes of this run in a page."""

    def __init__(self, page: Path, tier: str):
        sys.path.append(str(ROOT / "benchmarks"))  # behind those of tests, some of whose modules have the same names
        from _page import commit

        self.page, self.tier, self.started, self.commit = page, tier, datetime.datetime.now(), commit()

    def pytest_terminal_summary(self, terminalreporter):
        from _lib import as_markdown, machine
        from _page import write_section

        counts = [len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "skipped", "failed", "error")]
        minutes = (datetime.datetime.now() - self.started).total_seconds() / 60
        rows = [
            ["date", "commit", "passed", "skipped", "failed", "minutes"],
            [
                self.started.date().isoformat(),
                self.commit,
                *(f"{count:,}" for count in counts[:2]),
                f"{counts[2] + counts[3]:,}",
                f"{minutes:.0f}",
            ],
        ]
        text = f"{as_markdown(rows)}\n\nRun on {machine()}, by `make test-{self.tier}`.\n"
        write_section(str(self.page.parent), f"test-{self.tier}", "Latest complete run", text, self.page.name)

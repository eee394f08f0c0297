"""benchmarks/mutations.json fits the code: what a fault replaces is there, once. Whoever changes the line changes both."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def mutations(monkeypatch):
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import mutations

    yield mutations
    for name in ("mutations", "_page", "_lib", "_comparison", "_launch", "compare_tensorflow"):
        sys.modules.pop(name, None)


def test_every_mutation_can_be_made(mutations):
    found = mutations.load()
    assert mutations.check(found) == []
    assert len(found) >= 60 and {mutation["part"] for mutation in found} == set(mutations.PARTS)


def test_a_mutation_that_does_not_fit_is_told(mutations):
    [first, *_] = mutations.load()
    assert "0 times" in mutations.check([{**first, "old": "this is nowhere"}])[0]


def test_what_quick_notices_counts_for_test(mutations):
    [one, *_] = mutations.load()
    outcome = {"caught": True, "how": "failed", "test": "tests/x.py::y", "seconds": 1.0, "digest": mutations.digest_of(one)}
    results = {"suites": {"quick": {"mutations": {one["id"]: outcome}}}}
    assert mutations.noticed_by_less(results, "test", one)["test"] == "tests/x.py::y"
    for suite, changed in (("old", one), ("quick", one), ("test", {**one, "new": "pass"})):
        assert mutations.noticed_by_less(results, suite, changed) is None


def test_what_only_the_near_tests_missed_is_not_measured_yet(mutations):
    outcome = {"caught": False, "digest": "a", "near_only": True}
    assert mutations.is_measured(outcome, "a", near_only=True) and not mutations.is_measured(outcome, "a", near_only=False)
    assert not mutations.is_measured(outcome, "b", near_only=True) and not mutations.is_measured(None, "a", near_only=True)
    assert mutations.is_measured({**outcome, "near_only": False}, "a", near_only=False)
    assert mutations.share({"x": outcome, "y": {"caught": True}}, ["x", "y"]) == "at least 1 of 2 (50 %)"

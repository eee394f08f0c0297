"""docs/coverage.md is what docs/coverage.toml gives, and what its rows name exists."""

import ast
import functools
import re
import runpy
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = tomllib.loads((DOCS / "coverage.toml").read_text())["document"]
STATES = {"yes", "partly", "not there", "text"}
FIELDS = {"what", "state", "code", "proof", "paper", "ours", "pages", "deviates"}
NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?")

by_title = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["title"])


def rows(document):
    """(label for messages, row)"""
    for part in document["part"]:
        for row in part["row"]:
            yield f"{part['title']}: {row['what']}", row


@functools.cache
def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


@functools.cache
def numbers(page):
    """Numbers of a page, as they are and without their signs."""
    found = set(NUMBER.findall((DOCS / page).read_text()))
    return found | {number.lstrip("+-") for number in found}


@functools.cache
def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_is_what_the_data_give():
    script = runpy.run_path(str(DOCS / "site/coverage.py"))
    assert (DOCS / "coverage.md").read_text() == script["page"](), "run: python docs/site/coverage.py"
    assert set(script["STATES"]) == STATES


def test_all_reference_documents_are_there():
    assert {document["file"] for document in DOCUMENTS} == {
        "deepreduce-appendix.md",
        "kimad.md",
        "panthalia-dct.md",
        "survey-with-formulas.md",
        "topk-ef-system-design.md",
    }


@by_title
def test_every_part_of_a_document_has_rows(document):
    assert [part["title"] for part in document["part"]] == document["parts"]
    assert len(set(document["parts"])) == len(document["parts"])
    assert [part["title"] for part in document["part"] if not part.get("row")] == []


@by_title
def test_a_row_says_what_its_state_needs(document):
    for label, row in rows(document):
        assert set(row) <= FIELDS and row["what"] and row["state"] in STATES, label
        if row["state"] == "text":
            assert set(row) == {"what", "state"}, f"{label}: there is nothing to build"
        elif row["state"] == "yes":
            assert row.get("code") and row.get("proof"), f"{label}: where it is, and what proves it"
        else:
            assert row.get("deviates"), f"{label}: what is missing, or what there is instead"
        assert not row.get("ours") or row.get("pages"), f"{label}: a figure without its page"
        assert not any("|" in value for value in row.values() if isinstance(value, str)), f"{label}: | ends a cell"


@by_title
def test_code_and_proofs_that_a_row_names_are_there(document):
    for label, row in rows(document):
        for name in row.get("code", []):
            assert (ROOT / name).is_file(), f"{label}: {name}"
        for name in row.get("proof", []):
            file, _, function = name.partition("::")
            assert (ROOT / file).is_file(), f"{label}: {name}"
            assert bool(function) == file.startswith("tests/"), f"{label}: {name}: tests are named one by one"
            assert not function or function in functions(file), f"{label}: {file} has no {function}"


@by_title
def test_pages_that_a_row_names_are_there(document):
    for label, row in rows(document):
        linked = re.findall(r"\]\(([^)]+)\)", row.get("deviates", ""))
        for name in [*row.get("pages", []), *linked]:
            page, _, anchor = name.partition("#")
            assert (DOCS / page).is_file(), f"{label}: {name}"
            assert not anchor or anchor in anchors(page), f"{label}: {name}"


@by_title
def test_figures_are_those_of_the_pages(document):
    """After a new measurement, what has changed on a page changes here."""
    for label, row in rows(document):
        known = set().union(*(numbers(page.partition("#")[0]) for page in row.get("pages", [])))
        missing = [number for number in NUMBER.findall(row.get("ours", "")) if number not in known]
        assert not missing, f"{label}: {', '.join(missing)} are not on {', '.join(row['pages'])}"

"""What the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_tests_that_a_document_names_are_there(document):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
    assert named or document.name != "training.md"
    for file, name in named:
        functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_files_that_a_document_links_to_are_there(document):
    for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / link).exists(), link


def test_files_that_cluster_md_names_are_there():
    named = set(re.findall(r"(?<![\w./])(?:mpirun|tests|docs)/[\w./]*\w", (ROOT / "docs/cluster.md").read_text()))
    assert {"mpirun/hosts", "mpirun/env.sh"} < named
    assert [name for name in named if not (ROOT / name).exists()] == []

"""docs/support.md is what docs/support.toml gives, and the tests that it names are there."""

import ast
import runpy
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
ROOT = Path(__file__).parents[1]
DATA = tomllib.loads((ROOT / "docs/support.toml").read_text())
SCRIPT = runpy.run_path(str(ROOT / "docs/site/support.py"))
FOLDERS = [adapter["folder"] for adapter in DATA["adapter"]]


def test_the_page_is_what_the_data_give():
    assert (ROOT / "docs/support.md").read_text() == SCRIPT["page"](), "run: python docs/site/support.py"


def test_every_adapter_has_its_column():
    public = {path.stem for path in (ROOT / "adapters").glob("[!_]*.py")}
    others = {  # parts of other adapters, and federated training, which has clients and a server
        "horovod_torch_elastic",
        "local_adamw",
        "flower",
        "mpi",
        "onebit_adam",
        "tensorflow_callbacks",
    }
    assert set(FOLDERS) == public - others


@pytest.mark.parametrize("feature", DATA["feature"], ids=lambda feature: feature["what"])
def test_the_tests_of_a_feature_are_there(feature):
    assert {"what", *FOLDERS} >= feature.keys()
    for folder in FOLDERS:
        cell = feature.get(folder, [])
        if isinstance(cell, str):
            assert cell.startswith(SCRIPT["REFUSED"]) and len(cell) > len(SCRIPT["REFUSED"]), cell
            continue
        for test in cell:
            file, function = SCRIPT["test_of"](folder, test).split("::")
            tree = ast.parse((ROOT / "tests/adapters" / file).read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test

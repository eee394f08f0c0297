"""docs/reference/cli.md has the help of all commands, as they are now."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the layout of argparse's help differs between versions of Python"
)
def test_the_page_has_the_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    script = runpy.run_path(str(ROOT / "docs/site/command_help.py"))
    assert script["sections"]() in script["PAGE"].read_text(), "run: python docs/site/command_help.py"


def test_the_script_runs_from_its_folder():
    """A script's folder is where imports look first, and the one beside it is called coverage.py."""
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'docs/site')!r}); import runpy; runpy.run_module('command_help')"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)

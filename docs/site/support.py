"""Write docs/support.md from docs/support.toml.

python docs/site/support.py
"""

import tomllib
from pathlib import Path

DOCS = Path(__file__).parents[1]
DATA, PAGE = DOCS / "support.toml", DOCS / "support.md"
REFUSED = "no: "

INTRODUCTION = """\
# What each adapter supports

Written by `docs/site/support.py` from `docs/support.toml`; do not edit.

**yes** means that a test of that adapter proves it, with real ranks; the tests are listed below. An empty cell means that the
adapter has no test of its own for it. Accelerate, the Trainer, Lightning and Ray Train hand everything to the adapter for DDP, so
that what is proven there usually holds for them, too. **no** means that it is not there, for the reason that is given below.
"""


def page() -> str:
    """Make the page.

    Returns:
        Its text, as Markdown.
    """
    data = tomllib.loads(DATA.read_text())
    adapters, features = data["adapter"], data["feature"]
    table = [["", *(f"[{adapter['name']}]({adapter['page']})" for adapter in adapters)]]
    proofs = []
    for feature in features:
        cells = [feature.get(adapter["folder"]) for adapter in adapters]
        table.append([feature["what"], *map(_cell, cells)])
        proofs.append(f"**{feature['what']}**\n")
        for adapter, cell in zip(adapters, cells, strict=True):
            if cell is not None:
                proofs.append(f"- {adapter['name']}: {_proof(adapter['folder'], cell)}")
        proofs.append("")
    return (
        "\n".join(
            [INTRODUCTION, _markdown(table), "", "## The tests", "", *proofs]
        ).rstrip()
        + "\n"
    )


def _cell(cell: list[str] | str | None) -> str:
    if cell is None:
        return ""
    return "no" if isinstance(cell, str) else "yes"


def _proof(folder: str, cell: list[str] | str) -> str:
    if isinstance(cell, str):
        return f"no, because {cell.removeprefix(REFUSED)}"
    return ", ".join(f"`tests/adapters/{test_of(folder, test)}`" for test in cell)


def test_of(folder: str, test: str) -> str:
    """Name a test.

    Args:
        folder: The folder of the adapter's tests.
        test: FILE::FUNCTION from there.

    Returns:
        FILE::FUNCTION from tests/adapters.
    """
    return test.removeprefix("../") if test.startswith("../") else f"{folder}/{test}"


def _markdown(table: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], "|" + " --- |" * len(table[0]), *lines[1:]])


if __name__ == "__main__":
    PAGE.write_text(page())

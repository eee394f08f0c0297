"""Write docs/coverage.md from docs/coverage.toml.

python docs/site/coverage.py
"""

import tomllib
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parents[1]
DATA, PAGE = DOCS / "coverage.toml", DOCS / "coverage.md"
#: What rows may say of themselves.
STATES = ("yes", "partly", "not there", "text")

INTRODUCTION = """\
# Coverage of the reference documents

Written by `docs/site/coverage.py` from `docs/coverage.toml`; do not edit.

grace_ext was built after five documents. This page goes through them part by part, figures and tables included, and
says what of them is here, what is not, and what differs.

- *yes*: it is in the code, and the test or benchmark proves it. *partly*: something is missing, or was measured
  on another model or data set, as the last column says. *not there*: it is neither built nor measured as the document
  has it; code and figures that are named nevertheless are what comes nearest. *text*: a definition, a proof, or prose,
  with nothing to build.
- Functions of files `checks_*.py` run inside real ranks, under the `test_check` of their folder.
  `grace_ext/bench/run.py` is the command `python -m grace_ext bench`.
- Figures in the column *ours* are from the page that is linked beside them, and a test looks for each number there. An
  empty cell means that there is no figure. *Volume* is the share of the bytes of dense float32.
- A deviation that follows from the machine holds for all rows: two cores, no GPU, small models, and Fashion-MNIST and
  English text in place of the documents' data sets.
"""


def page() -> str:
    """Make the page.

    Returns:
        Its text, as Markdown.
    """
    documents = tomllib.loads(DATA.read_text())["document"]
    parts = [INTRODUCTION, _summary(documents)]
    for document in documents:
        parts += [f"## {document['title']}", document["source"]]
        for part in document["part"]:
            parts += [f"### {part['title']}", _rows(part["row"])]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _summary(documents: list[dict]) -> str:
    table = [["document", "rows", *STATES]]
    for document in documents:
        counts = Counter(
            row["state"] for part in document["part"] for row in part["row"]
        )
        name = document["title"]
        numbers = [counts.total(), *(counts[state] for state in STATES)]
        table.append([name, *map(str, numbers)])
    return _table(table, numbers=True)


def _rows(rows: list[dict]) -> str:
    """Make the table of a part, without columns that have no entry."""
    table = [["what", "there", "code", "proven by", "document", "ours", "deviates"]]
    table += [
        [
            row["what"],
            f"**{row['state']}**" if row["state"] == "not there" else row["state"],
            _names(row.get("code", [])),
            _names(row.get("proof", [])),
            row.get("paper", ""),
            _ours(row),
            row.get("deviates", ""),
        ]
        for row in rows
    ]
    used = [any(cells) for cells in zip(*table[1:], strict=True)]
    return _table(
        [[cell for cell, keep in zip(row, used, strict=True) if keep] for row in table]
    )


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ours(row: dict) -> str:
    pages = ", ".join(
        f"[{name.partition('#')[0]}]({name})" for name in row.get("pages", [])
    )
    figure = row.get("ours", "")
    return f"{figure} ({pages})" if figure and pages else figure or pages


def _table(rows: list[list[str]], numbers: bool = False) -> str:
    rule = ["---", *["--:" if numbers else "---"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


if __name__ == "__main__":
    PAGE.write_text(page())

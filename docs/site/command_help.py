"""Write the help of every command into docs/reference/cli.md.

python docs/site/command_help.py
"""

import argparse
import os
import re
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE in sys.path:
    sys.path.remove(HERE)  # its coverage.py would be the module that numba imports

from grace_ext import cli  # noqa: E402

PAGE = Path(__file__).parents[1] / "reference/cli.md"
SECTION = re.compile(r"(?<=<!-- help:begin -->\n).*(?=<!-- help:end -->)", re.DOTALL)


def sections() -> str:
    """The help of the program and of each command, as Markdown."""
    os.environ["COLUMNS"] = "100"
    parser = cli._parser()
    (commands,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    texts = {"grace-ext": parser.format_help()}
    texts |= {
        f"grace-ext {name}": command.format_help()
        for name, command in commands.choices.items()
    }
    text = "\n".join(
        f"## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in texts.items()
    )
    return re.sub(
        r"default: \d+, the cores", "default: the cores", text
    )  # of this machine


if __name__ == "__main__":
    PAGE.write_text(SECTION.sub(lambda _: sections(), PAGE.read_text()))

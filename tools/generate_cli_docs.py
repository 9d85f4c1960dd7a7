"""Write the commands of docs/cli.md from those of `kvpool`, or with --check say whether they are current.

The page's own words stand above the marker and are left alone. Run it with the environment of `make setup`.
"""

import re
import sys
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from kvpool_cli.common import COMMON_FLAGS
from kvpool_cli.main import app
from tools import generated_page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
MARKER = "<!-- Below: written by tools/generate_cli_docs.py from the commands. -->"
_PATHS = re.compile(r"`(?:PosixPath|Path)\('?([^`']*)'?\)`")


def commands_text() -> str:
    """A section for each command. The options that all have are in the first section only."""
    text = get_docs_for_click(obj=app, ctx=typer.Context(app, info_name="kvpool"), name="kvpool")
    first, *sections = re.split(r"^(?=#+ `kvpool\b)", text, flags=re.MULTILINE)[1:]
    first = re.sub(r"^#", "##", first)
    return _PATHS.sub(r"`\1`", first + "".join(map(_own_options, sections)))


def _own_options(section: str) -> str:
    shared = "|".join(map(re.escape, (*COMMON_FLAGS, "-h, --help", "--help")))
    lines = [line for line in section.splitlines() if not re.match(rf"\* `(?:{shared})(?![\w-])", line)]
    text = "\n".join(lines).replace("**Options**:\n\n\n", "") + "\n"
    head, found, examples = text.partition("Examples:\n")
    return f"{head}```\n{examples.strip().replace(chr(10) * 2, chr(10))}\n```\n\n" if found else text


def page_text(current: str) -> str:
    """The page with its current generated part."""
    return generated_page.page_text(current, MARKER, commands_text())


def main() -> int:
    """Write the page; with --check only compare, exit code 1 if it is not current."""
    return generated_page.write_or_check(PAGE, page_text, description=__doc__, module="tools.generate_cli_docs")


if __name__ == "__main__":
    sys.exit(main())

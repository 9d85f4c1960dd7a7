"""Write the commands of docs/cli.md from the parser of `kvpool`, or with --check say whether they are current.

The page's own words stand above the marker and are left alone. Run it with the environment of `make setup`.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from kvpool_cli.main import COMMANDS, build_parser
from tools import generated_page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
MARKER = "<!-- Below: written by tools/generate_cli_docs.py from the parser. -->"


def commands_text() -> str:
    """A section for each command."""
    parser = build_parser(list(COMMANDS))
    return "\n".join(line for name, sub in _below(parser) for line in _section(name, sub))


def _below(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f"## kvpool {name}", "", _flat(parser.description or ""), "")
    if name in COMMANDS:
        yield from ("```", *COMMANDS[name].examples, "```", "")
    yield from _options(parser)
    for action, sub in _below(parser):
        summary = next(
            choice.help or ""
            for group in parser._actions
            if isinstance(group, argparse._SubParsersAction)
            for choice in group._choices_actions
            if choice.dest == action
        )
        yield from (f"### kvpool {name} {action}", "", _flat(summary).capitalize() + ".", "")
        yield from _options(sub)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        text = _flat((action.help or "") % {"default": action.default})
        if action.option_strings:
            value = "" if action.nargs == 0 else f" {_value(action)}"
            names = ", ".join(action.option_strings)
            rows.append(f"| `{names}{value}` | {text} |")
        else:
            rows.append(f"| `{_value(action)}` | {text} |")
    if rows:
        yield from ("| argument | meaning |", "|---|---|", *rows, "")


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    many = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}
    return many.get(str(action.nargs), name)


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def page_text(current: str) -> str:
    """The page with its generated part anew."""
    return generated_page.page_text(current, MARKER, commands_text())


def main() -> int:
    """Write the page; with --check only compare, exit code 1 if it is not current."""
    return generated_page.write_or_check(PAGE, page_text, description=__doc__, module="tools.generate_cli_docs")


if __name__ == "__main__":
    sys.exit(main())

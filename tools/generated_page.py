"""A page of docs/ whose end is generated: what stands above its marker line is written by hand and left alone."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def page_text(current: str, marker: str, generated: str) -> str:
    """The page with its current generated part. Raises SystemExit if it has no marker line."""
    own, found, _ = current.partition(marker)
    if not found:
        raise SystemExit(f"the page has no marker line; put this where the generated part begins: {marker}")
    return f"{own}{marker}\n\n{generated.strip()}\n"


def write_or_check(page: Path, wanted: Callable[[str], str], *, description: str | None, module: str) -> int:
    """Write `page` as `wanted` makes it of its text; with --check only compare. Exit code 1 if it is not current.

    module: what `python -m` runs to write it, for the message.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check: bool = parser.parse_args().check
    current = page.read_text()
    text = wanted(current)
    if not check:
        page.write_text(text)
        return 0
    if current != text:
        print(f"{page.name} is not current; run python -m {module}", file=sys.stderr)
    return int(current != text)

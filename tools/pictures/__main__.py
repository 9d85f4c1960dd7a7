"""Write docs/images and the plots of README.md from bench/results, or with --check say whether they are current."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from tools.pictures.figures import Figure, claims, figures

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGES = REPOSITORY / "docs" / "images"
README = REPOSITORY / "README.md"
FIRST = "<!-- First plots: written by python -m tools.pictures from bench/results. -->"
BEGIN = "<!-- Plots: written by python -m tools.pictures from bench/results. -->"
END = "<!-- End of the plots. -->"
_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def pictures() -> dict[str, tuple[Figure, str]]:
    """File name, and the figure and theme of each picture."""
    return {f"{figure.name}-{theme}.svg": (figure, theme) for figure in figures() for theme in ("light", "dark")}


def described(path: Path) -> str:
    """The description in a picture's metadata; empty without a picture."""
    if not path.exists():
        return ""
    return next((part.text or "" for part in ElementTree.parse(path).iter(_DESCRIPTION)), "")


def plots(shown: Sequence[Figure]) -> str:
    """Plots, two in a row, each with its machine below it."""
    rows = [shown[at : at + 2] for at in range(0, len(shown), 2)]
    lines = "\n".join(f"<tr>\n{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>\n{lines}\n</table>\n"


def _cell(figure: Figure) -> str:
    place = f"docs/images/{figure.name}"
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{place}-dark.svg">'
    picture = f'<picture>{dark}<img src="{place}-light.svg" alt="{figure.chart.title}"></picture>'
    return f'<td width="50%" valign="top">{picture}<br><sub>{figure.caption}</sub></td>\n'


def readme_text(current: str) -> str:
    """README.md with current plots. Raises SystemExit if it has no place for them."""
    shown = figures()
    for begin, text in ((FIRST, plots(shown[:2])), (BEGIN, f"{plots(shown[2:])}\n{claims()}")):
        before, found, rest = current.partition(begin)
        _, end, after = rest.partition(END)
        if not found or not end:
            raise SystemExit(f"README.md has no place for the plots; put two lines there: {begin} and {END}")
        current = f"{before}{begin}\n{text}\n{END}{after}"
    return current


def stale() -> list[str]:
    """What is not current, sorted. Pictures are compared by the data in them: how they are drawn may vary."""
    wanted = pictures()
    present = {path.name for path in IMAGES.glob("*.svg")}
    names = present - wanted.keys()
    names |= {name for name, (figure, _) in wanted.items() if described(IMAGES / name) != figure.description}
    current = README.read_text()
    return sorted(names) + (["README.md"] if current != readme_text(current) else [])


def main() -> int:
    """Exit code 1 with --check if something is not current."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        names = stale()
        if names:
            print(f"not current: {', '.join(names)}; run python -m tools.pictures", file=sys.stderr)
        return int(bool(names))
    from tools.pictures.drawing import draw  # matplotlib, which the check does without

    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, (figure, theme) in pictures().items():
        (IMAGES / name).write_text(draw(figure.chart, theme, figure.description))
    README.write_text(readme_text(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the tables of docs/configuration.md from the services' configuration classes, or with --check compare them.

The page's own words stand above the marker and are left alone. Run it with the environment of `make setup`.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_index.config import IndexConfig
from kvpool_pagestore.config import PageStoreConfig
from kvpool_server.config import OptionText, option_texts

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MARKER = "<!-- Below: written by tools/generate_configuration_docs.py from the configuration classes. -->"
SERVICES: tuple[tuple[str, type, str], ...] = (
    ("index", IndexConfig, "KVPOOL_INDEX"),
    ("pagestore", PageStoreConfig, "KVPOOL_PAGESTORE"),
    ("gpuagent", GpuAgentConfig, "KVPOOL_GPUAGENT"),
)


def tables_text() -> str:
    """A section for each service."""
    return "\n".join(line for name, config, prefix in SERVICES for line in _section(name, config, prefix))


def _section(name: str, config: type, prefix: str) -> Iterator[str]:
    summary = (config.__doc__ or "").strip().split("\n\n")[0]
    yield from (f"## {name}", "", f"{summary} `python -m kvpool_{name}.main`, variables `{prefix}_*`.", "")
    yield from ("| flag | value | default | meaning |", "|---|---|---|---|")
    yield from (_row(option) for option in option_texts(config, env_prefix=prefix))
    yield ""


def _row(option: OptionText) -> str:
    name = f"`{option.flag}`" if option.flag else f"`{option.variable}`, environment only"
    default = f"`{option.default}`" if option.default not in ("", "unset", "required") else option.default or "empty"
    return f"| {name} | {_cell(option.values)} | {default} | {_cell(option.help)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page_text(current: str) -> str:
    """The page with its generated part anew."""
    own, marker, _ = current.partition(MARKER)
    if not marker:
        raise SystemExit(f"{PAGE} has no marker line; put this where the tables shall begin: {MARKER}")
    return f"{own}{MARKER}\n\n{tables_text().strip()}\n"


def main() -> int:
    """Write the page; with --check only compare, exit code 1 if it is not current."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check: bool = parser.parse_args().check
    current = PAGE.read_text()
    wanted = page_text(current)
    if check:
        if current != wanted:
            print(f"{PAGE.name} is not current; run python tools/generate_configuration_docs.py", file=sys.stderr)
        return int(current != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

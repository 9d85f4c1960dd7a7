"""Write the tables of docs/configuration.md from the services' configuration classes, or with --check compare them.

The page's own words stand above the marker and are left alone. Run it with the environment of `make setup`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_index.config import IndexConfig
from kvpool_pagestore.config import PageStoreConfig
from kvpool_server.config import OptionText, option_texts
from tools import generated_page

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
    """The page with its current generated part."""
    return generated_page.page_text(current, MARKER, tables_text())


def main() -> int:
    """Write the page; with --check only compare, exit code 1 if it is not current."""
    return generated_page.write_or_check(
        PAGE, page_text, description=__doc__, module="tools.generate_configuration_docs"
    )


if __name__ == "__main__":
    sys.exit(main())

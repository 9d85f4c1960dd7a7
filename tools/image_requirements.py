"""Print what extras of this distribution install, one requirement a line: `python tools/image_requirements.py index`.

An image installs these in a layer of its own, which a change of our own code leaves as it is. Standard library only.
"""

import re
import sys
import tomllib
from pathlib import Path

_OWN_EXTRAS = re.compile(r"kvpool\[([a-z0-9,-]+)\]")


def requirements(project: "dict[str, object]", extras: "list[str]") -> "list[str]":
    """Of the base and the extras, in the order of the file. Raises KeyError for an extra that is not there."""
    base, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(base, list) and isinstance(optional, dict), "pyproject.toml is not of this distribution"
    found: dict[str, None] = dict.fromkeys(base)
    waiting = list(extras)
    while waiting:
        for requirement in optional[waiting.pop(0)]:
            own = _OWN_EXTRAS.fullmatch(requirement)
            if own is None:
                found.setdefault(requirement)
            else:
                waiting += own[1].split(",")
    return list(found)


def main() -> None:
    """Read pyproject.toml of the working directory."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.stdout.write("\n".join(requirements(project, sys.argv[1:])) + "\n")


if __name__ == "__main__":
    main()

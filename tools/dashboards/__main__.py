"""Write k8s/dashboards/*.json, or with --check say whether they are current."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.dashboards.engines import ENGINES
from tools.dashboards.gpuagent import GPUAGENT
from tools.dashboards.index import INDEX
from tools.dashboards.overview import OVERVIEW
from tools.dashboards.pagestore import PAGESTORE

DASHBOARDS = (OVERVIEW, INDEX, PAGESTORE, GPUAGENT, ENGINES)
DIRECTORY = Path(__file__).resolve().parents[2] / "k8s" / "dashboards"


def texts() -> dict[str, str]:
    """File name and content of each."""
    return {f"{one.uid}.json": json.dumps(one.document(), indent=2) + "\n" for one in DASHBOARDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    stale = []
    for name, text in texts().items():
        path = DIRECTORY / name
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
    if stale:
        sys.exit(f"not current: {', '.join(stale)}; run python -m tools.dashboards")


if __name__ == "__main__":
    main()

"""Where the engines' environments are, and how a check is run in one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINES = ("sglang", "lmcache")
CHECK_S = 110.0


def python_of(engine: str) -> Path:
    """Its interpreter. KVPOOL_ENGINE_VENVS: the directory of the environments, if it is not the repository."""
    directory = Path(os.environ.get("KVPOOL_ENGINE_VENVS", str(REPOSITORY)))
    return directory / f".venv-{engine}" / "bin" / "python"


def run_check(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run the script of that name, which begins with the engine's; what it prints. Fails with the end of its output."""
    python = python_of(name.split("_")[0])
    done = subprocess.run(
        [str(python), str(REPOSITORY / "tests" / "engines" / f"{name}.py"), json.dumps(given)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "clients" / "python")},
        cwd=REPOSITORY / "tests" / "engines",
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    reported: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return reported

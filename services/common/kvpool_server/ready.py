"""The ready file: how whoever started a service learns which ports it took, and that it serves.

A JSON object with at least `pid`, `endpoint` (host:port of the control service) and `metrics_url`; services may add
more. It appears whole or not at all.
"""

import json
import os
from pathlib import Path

from kvpool.core.errors import StartupFailed


def clear_ready_file(path: Path | None) -> None:
    """Remove what an earlier run left, so that nobody takes it for ours. Call before anything else is started."""
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StartupFailed(f"cannot replace ready file {path}: {error.strerror}; configure another path") from error


def write_ready_file(path: Path | None, **values: str | int) -> None:
    """Publish the values and this process's id. Nothing happens without a path. Raises StartupFailed."""
    if path is None:
        return
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        hidden.write_text(json.dumps({"pid": os.getpid(), **values}, indent=1) + "\n", encoding="utf-8")
        hidden.replace(path)
    except OSError as error:
        raise StartupFailed(f"cannot write ready file {path}: {error.strerror}; configure another path") from error

"""Waiting for what a process beside a bench brings about. (kvpool.testing, which waits too, is for tests alone.)"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL_INTERVAL_S = 0.01  # no event reports it


def until(condition: Callable[[], object], timeout_s: float, what: str, *, poll_s: float = _POLL_INTERVAL_S) -> None:
    """Return when the condition holds. Raises TimeoutError, saying what was waited for."""
    ends_at_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends_at_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(poll_s)


def ready_document(process: subprocess.Popen[Any], ready_file: Path, timeout_s: float = 30.0) -> dict[str, Any]:
    """What the process wrote when it served, endpoints among it. Raises RuntimeError at once if it has ended."""
    until(lambda: ready_file.exists() or process.poll() is not None, timeout_s, "a service that serves")
    if process.poll() is not None:
        raise RuntimeError(f"{process.args!r} ended with code {process.returncode} before it served")
    document: dict[str, Any] = json.loads(ready_file.read_text())
    return document

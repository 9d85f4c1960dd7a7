"""The `kvpool` command, whose calls take as long as they take: a machine under test stands still for seconds."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from kvpool_cli import main, status, targets, top, top_metrics
from kvpool_cli.doctor import cluster as doctor_cluster
from kvpool_cli.doctor import redis_server

PATIENCE_S = 60.0


def run_patiently(argv: Sequence[str]) -> int:
    """Return the exit code."""
    with (
        mock.patch.object(targets, "CALL_TIMEOUT_S", PATIENCE_S),
        mock.patch.object(status, "NODE_TIMEOUT_S", PATIENCE_S),
        mock.patch.object(top_metrics, "FETCH_TIMEOUT_S", PATIENCE_S),
        mock.patch.object(top, "_HOT_TIMEOUT_S", PATIENCE_S),
        mock.patch.object(doctor_cluster, "_CONNECT_TIMEOUT_S", PATIENCE_S),
        mock.patch.object(redis_server, "_TIMEOUT_S", PATIENCE_S),
    ):
        return main.run_command(argv)


def run_here(argv: Sequence[str], text: str | None) -> tuple[int, str, str]:
    """Run a command in this process, with `text` on its stdin. Return its exit code, stdout and stderr."""
    said, error = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(error), mock.patch.object(sys, "stdin", io.StringIO(text or "")):
        return run_patiently(argv), said.getvalue(), error.getvalue()


if __name__ == "__main__":
    sys.exit(run_patiently(sys.argv[1:]))

"""The `kvpool` command, whose calls take as long as they take: a machine under test stands still for seconds."""

from __future__ import annotations

import sys

from kvpool_cli import main, status, targets, top, top_metrics

PATIENCE_S = 60.0

if __name__ == "__main__":
    targets.CALL_TIMEOUT_S = status.NODE_TIMEOUT_S = top_metrics.FETCH_TIMEOUT_S = top._HOT_TIMEOUT_S = PATIENCE_S
    sys.exit(main.run_command(sys.argv[1:]))

"""`kvpool cluster down`: end the cluster of a state directory, whatever state it is in."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kvpool_cli.cluster import remove_socket_dir
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_OK, CommandFailed
from kvpool_cli.logs import log_dir
from kvpool_cli.output import print_json, show
from kvpool_cli.state import read_state, state_file
from kvpool_cli.supervise import STOP_ORDER, STOP_TIMEOUT_S, end_leftovers

_POLL_S = 0.05


def down(common: Common) -> int:
    """Drain and end the cluster that `kvpool cluster up` started; clean up after one that was killed."""
    message = end_cluster(common.state_dir)
    if common.json:
        print_json({"version": 1, "message": message})
    else:
        show(message)
    return EXIT_OK


def end_cluster(state_dir: Path) -> str:
    """End it; what was done. Raises CommandFailed if it does not end."""
    state = read_state(state_dir)
    if state is None:
        return f"no cluster runs in {state_dir}"
    if not state.supervised():
        ended = end_leftovers(state)
        state_file(state_dir).unlink(missing_ok=True)
        remove_socket_dir(state_dir)
        return f"ended leftovers: {', '.join(ended)}" if ended else "the cluster was dead already"
    os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S * len(STOP_ORDER)
    while state.supervised():
        if time.monotonic() > deadline_s:
            logs = log_dir(state_dir)
            raise CommandFailed(f"`kvpool cluster up` (pid {state.supervisor_pid}) did not end; see {logs}")
        time.sleep(_POLL_S)
    return "cluster ended"

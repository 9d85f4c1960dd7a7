"""`kvpool down`: end the cluster of a state directory, whatever state it is in."""

from __future__ import annotations

import argparse
import os
import signal
import time

from kvpool_cli.cluster import remove_socket_dir
from kvpool_cli.logs import log_dir
from kvpool_cli.output import EXIT_OK, CommandFailed, show
from kvpool_cli.state import read_state, state_file
from kvpool_cli.supervise import STOP_ORDER, STOP_TIMEOUT_S, end_leftovers

_POLL_S = 0.05


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool down`."""
    parser.set_defaults(run=run_down)


def run_down(arguments: argparse.Namespace) -> int:
    """Tell the supervisor to drain; clean up after one that was killed."""
    state = read_state(arguments.state_dir)
    if state is None:
        show(f"no cluster runs in {arguments.state_dir}")
        return EXIT_OK
    if not state.supervised():
        ended = end_leftovers(state)
        state_file(arguments.state_dir).unlink(missing_ok=True)
        remove_socket_dir(arguments.state_dir)
        show(f"ended leftovers: {', '.join(ended)}" if ended else "the cluster was dead already")
        return EXIT_OK
    os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S * len(STOP_ORDER)
    while state.supervised():
        if time.monotonic() > deadline_s:
            logs = log_dir(arguments.state_dir)
            raise CommandFailed(f"`kvpool up` (pid {state.supervisor_pid}) did not end; see {logs}")
        time.sleep(_POLL_S)
    show("cluster ended")
    return EXIT_OK

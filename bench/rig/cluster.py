"""The cluster that a bench measures: its own, or one that runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.rig.results import progress
from kvpool_cli.cluster import ClusterOptions
from kvpool_cli.errors import CommandFailed
from kvpool_cli.output import say
from kvpool_cli.state import ClusterState, read_state
from kvpool_cli.supervise import Supervisor

BENCH_PREFIX = "kvpool-bench-"


@contextmanager
def bench_cluster(options: ClusterOptions, parent: Path | None = None) -> Iterator[tuple[ClusterState, Path]]:
    """Start a cluster in a temporary directory, in place of options.state_dir, and end it; its state and directory.

    parent: where that directory goes; by default among the system's temporary ones. Raises StartupFailed.
    """
    with tempfile.TemporaryDirectory(prefix=BENCH_PREFIX, dir=parent) as directory:
        progress("starting a cluster")
        supervisor = Supervisor(replace(options, state_dir=Path(directory)), lambda: False, say)
        try:
            yield supervisor.start(), Path(directory)
        finally:
            progress("ending the cluster")
            supervisor.stop()
            progress("")


@contextmanager
def running_cluster(state_dir: Path) -> Iterator[tuple[ClusterState, Path]]:
    """The cluster that runs in a state directory. Raises CommandFailed if none does."""
    state = read_state(state_dir)
    if state is None or not state.supervised():
        raise CommandFailed(
            f"no cluster runs in {state_dir}; start one with `kvpool cluster up`, or leave out --state-dir"
        )
    yield state, state_dir


def endpoint_of(state: ClusterState, role: str, key: str) -> str:
    """An endpoint of the first process of a role. Raises CommandFailed if there is none."""
    for process in state.of_role(role):
        if process.endpoints.get(key):
            return process.endpoints[key]
    raise CommandFailed(f"the cluster has no {role}; start it with one")

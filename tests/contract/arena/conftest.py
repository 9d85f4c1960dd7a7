"""Every arena: sealed memory files, and that of the simulation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool_pagestore.adapters.arena import MemfdArena
from tests.contract.arena.test_contract import Host
from tests.fixtures.pagestore import shared_memory_directory
from tests.sim.host import SimArena, SimHost
from tests.sim.loop import Process

CAPACITY_BYTES = 8 << 20


class FileHost(Host):
    """A directory of session files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def start(self) -> MemfdArena:
        arena = MemfdArena(self._directory)
        arena.open(CAPACITY_BYTES)
        return arena

    def crash(self, arena: MemfdArena) -> None:  # type: ignore[override]
        arena.close(remove=False)

    def give_up(self, arena: MemfdArena, fd: int) -> Callable[[], None]:  # type: ignore[override]
        peer_fd = os.dup(fd)
        os.close(fd)
        return lambda: os.close(peer_fd)


class SimulatedHost(Host):
    """A machine of the simulation."""

    def __init__(self) -> None:
        self._host = SimHost("host", CAPACITY_BYTES)
        self._processes: dict[SimArena, Process] = {}

    def start(self) -> SimArena:
        process = Process("pagestore")
        arena = SimArena(self._host, process)
        self._processes[arena] = process
        return arena

    def crash(self, arena: SimArena) -> None:  # type: ignore[override]
        process = self._processes[arena]
        process.alive = False
        self._host.process_gone(process)

    def give_up(self, arena: SimArena, fd: int) -> Callable[[], None]:  # type: ignore[override]
        peer = Process("peer")
        self._host.session_files[self._host.files_by_fd[fd]].add(peer)
        arena.close_fd(fd)
        return lambda: self._host.process_gone(peer)


@pytest.fixture(params=["files", "simulated"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with ExitStack() as stack:
        if request.param == "simulated":
            yield SimulatedHost()
        else:
            yield FileHost(stack.enter_context(shared_memory_directory()) / "arena")

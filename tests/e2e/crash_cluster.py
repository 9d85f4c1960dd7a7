"""A real cluster over a real Redis whose processes can be started so that they die at a named step."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvpool.client.page_items import AcquireItem, ReserveItem, Slot
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_control import PageStoreControl, PageStoreStatus
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import KvPoolError
from kvpool.testing import eventually
from tests.e2e.service_processes import Process
from tests.fixtures.pagestore import KEYSPACES, PAGE_BYTES, TENANT, fill_page, metadata, page_key, sealed_page
from tests.fixtures.patience import LEASE_TTL_MS, PATIENCE_S, SERVICES_MS, patient
from tests.fixtures.redis_server import free_port, running_redis

CLIENT = patient()
DIES_WITHIN_S = PATIENCE_S
_WINDOW = 64  # pages of one reserve


class FaultyProcess(Process):
    """A service process; `fault` is armed at its next start only."""

    fault = ""

    def __init__(self, module: str, directory: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        super().__init__(module, directory, *flags)

    def start(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
        kept |= self._environment
        if self.fault:
            kept |= {"KVPOOL_FAULT": self.fault, "KVPOOL_ALLOW_FAULTS": "1"}
        self.fault = ""
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=kept, stderr=log, stdout=log)

    def restart(self, fault: str = "") -> None:
        """Kill it and start it again, armed; returns when it runs."""
        self.kill()
        self.fault = fault
        self.start()


class CrashCluster:
    """Redis, one index, two pagestores, and what is started beside them."""

    def __init__(self, directory: Path, shm: Path, redis_url: str, processes: list[Process]) -> None:
        """processes: gets all that are started; the caller ends them."""
        self._directory, self._shm = directory, shm
        self.processes = processes
        self.index = FaultyProcess(
            "kvpool_index",
            directory / "index",
            *("--listen", f"127.0.0.1:{free_port()}", "--tenant", TENANT),
            *("--lease-ttl-ms", str(LEASE_TTL_MS), "--redis-timeout-ms", SERVICES_MS),
            environment={"KVPOOL_INDEX_REDIS_URL": redis_url},
        )
        processes.append(self.index)
        self.index_endpoint: str = self.index.wait_ready()["endpoint"]  # whenever it is started
        self.stores = {name: self._pagestore(name) for name in "ab"}
        for store in self.stores.values():
            store.wait_ready()

    def _pagestore(self, name: str) -> FaultyProcess:
        directory = self._directory / f"pagestore-{name}"
        process = FaultyProcess(
            "kvpool_pagestore",
            directory,
            *("--data-dir", str(directory / "data"), "--index-endpoints", self.index_endpoint, "--tenant", TENANT),
            *("--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--host-id", name),
            *("--socket", str(self.socket(f"{name}.store")), "--session-dir", str(self._shm)),
            *("--arena-bytes", str(32 << 20), "--segment-bytes", str(4 << 20), "--disk-bytes", str(64 << 20)),
            *("--heartbeat-interval-ms", "5000", "--index-timeout-ms", SERVICES_MS),
            *("--quarantine-grace-ms", "50", "--quarantine-poll-ms", "20"),
        )
        self.processes.append(process)
        return process

    def agent(self) -> FaultyProcess:
        """An agent on the host of pagestore a."""
        directory = self._directory / "agent"
        process = FaultyProcess(
            "kvpool_gpuagent",
            directory,
            *("--data-dir", str(directory / "data"), "--index-endpoints", self.index_endpoint, "--tenant", TENANT),
            *("--socket", str(self.socket("agent")), "--host-id", "a"),
            *("--pagestore-socket", str(self.socket("a.store")), "--index-timeout-ms", SERVICES_MS),
            *("--heartbeat-interval-ms", "5000"),
        )
        self.processes.append(process)
        return process

    def socket(self, name: str) -> Path:
        return self._shm / name

    def endpoint(self, name: str) -> str:
        return f"unix:{self.socket(f'{name}.store')}"

    def source(self, name: str) -> RemoteSource:
        """Where the pages of a pagestore are."""
        ready = self.stores[name].wait_ready()
        return RemoteSource(
            node_id=bytes.fromhex(ready["node_id"]),
            incarnation=ready["incarnation"],
            bulk_endpoint=ready["bulk_endpoint"],
        )

    async def open(self, name: str) -> PageStoreSession:
        plan = SessionPlan(endpoint=self.endpoint(name), peer_name="crash matrix", keyspaces=KEYSPACES)
        return await PageStoreSession.open(plan, CLIENT)

    async def flush(self, name: str) -> None:
        """Everything committed so far is durable afterwards."""
        control = PageStoreControl(self.endpoint(name), CLIENT)
        try:
            outcome = await control.flush(timeout_s=60)
            assert outcome.failed_count == 0
        finally:
            await control.close()

    async def at_rest(self, name: str) -> PageStoreStatus:
        """Return when no session holds anything of a pagestore any more."""
        control = PageStoreControl(self.endpoint(name), CLIENT)

        async def nothing_is_held() -> bool:
            status = await control.status()
            held = status.session_count, status.lease_count, status.arena_quarantined_bytes, status.dirty_page_count
            return held == (0, 0, 0, 0)

        try:
            await eventually(nothing_is_held)
            return await control.status()
        finally:
            await control.close()


async def store_pages(session: PageStoreSession, numbers: Sequence[int]) -> None:
    """Write pages and commit them. Raises what the pagestore says."""
    for start in range(0, len(numbers), _WINDOW):
        window = numbers[start : start + _WINDOW]
        results = await session.reserve([ReserveItem(page_key(one), PAGE_BYTES, metadata(one)) for one in window])
        leases = []
        for number, result in zip(window, results, strict=True):
            if isinstance(result.error, KvPoolError):
                raise result.error
            if result.slot is not None:
                _fill(session, result.slot, number)
                leases.append(result.slot.lease_id)
        assert await session.commit(leases) == []


async def hits(session: PageStoreSession, numbers: Sequence[int], *sources: RemoteSource) -> set[int]:
    """Which pages are served; every byte of those is compared."""
    found: set[int] = set()
    for start in range(0, len(numbers), _WINDOW):
        window = numbers[start : start + _WINDOW]
        items = [AcquireItem(page_key(one), sources, metadata(one)) for one in window]
        async with session.acquire(items, wait_s=60) as answers:
            async for answer in answers:
                if answer.slot is not None:
                    number = window[answer.item_index]
                    with session.slot_view(*answer.slot.place) as view:
                        assert bytes(view) == sealed_page(page_key(number)), f"page {number} has wrong bytes"
                    found.add(number)
                    await session.release([answer.slot.lease_id])
    return found


def _fill(session: PageStoreSession, slot: Slot, number: int) -> None:
    with session.slot_view(*slot.place) as view:
        fill_page(view, page_key(number))


def _kill_all(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()


@contextmanager
def crash_cluster(directory: Path) -> Iterator[CrashCluster]:
    """Killed with everything it has left in shared memory when the block ends."""
    shm = Path("/dev/shm") / f"kvpool-test-{os.getpid()}-{directory.name[-20:]}"
    shm.mkdir(mode=0o700)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        redis = stack.enter_context(running_redis(persist=True))
        processes: list[Process] = []
        stack.callback(_kill_all, processes)
        yield CrashCluster(directory, shm, redis.url, processes)

"""Does anything break when two pagestores are killed and restarted at random, for minutes, under load?

A real cluster (Redis, index, two pagestores with small budgets) serves several clients that store pages, load them from
their own pagestore or through it from the other one, and compare every byte. Meanwhile pagestores are killed with
SIGKILL and started again. At the end, when nothing is killed any more, everything must come to rest by itself.

wrong_bytes, hung_calls and what is leaked must be 0. A call hangs if it has not ended 5 s after its own deadline.

Run: nice -n 10 python -m bench.soak [--minutes 10] [--clients 6] [--seed 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from kvpool.client.page_items import AcquireItem, ReserveItem
from kvpool.client.pagestore import PageStoreSession
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt
from tests.e2e.crash_cluster import CLIENT, CrashCluster, crash_cluster
from tests.fixtures.pagestore import PAGE_BYTES, fill_page, metadata, page_key, sealed_page

T = TypeVar("T")

PAGES = 3000  # that are ever stored: several times what the disk tiers hold
BATCH = 16  # pages of one operation
DEADLINE_S = 15.0  # the longest that an operation's own timeouts add up to
MARGIN_S = 5.0
UP_S = (1.0, 6.0)  # between two kills
DOWN_S = (0.0, 1.5)


class Soak:
    """One run."""

    def __init__(self, cluster: CrashCluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.sources: dict[str, RemoteSource] = {}
        self.ended = False

    async def kill_at_random(self, until_s: float) -> None:
        """Kill one of the pagestores, start it again, and so on."""
        while time.monotonic() < until_s:
            await asyncio.sleep(self.random.uniform(*UP_S))
            name = self.random.choice("ab")
            store = self.cluster.stores[name]
            await asyncio.to_thread(store.kill)
            self.counts["kills"] += 1
            await asyncio.sleep(self.random.uniform(*DOWN_S))
            began_s = time.monotonic()
            store.start()
            await asyncio.to_thread(store.wait_ready)
            self.counts["slowest_start_ms"] = max(
                self.counts["slowest_start_ms"], round((time.monotonic() - began_s) * 1e3)
            )
            self.sources[name] = self.cluster.source(name)

    async def client(self, number: int) -> None:
        """Store and load until the end, whatever becomes of the session."""
        rng, name = random.Random(self.random.random()), "ab"[number % 2]
        session: PageStoreSession | None = None
        while not self.ended:
            try:
                session = await self._bounded("connect", self._connected(name, session))
                first = int(rng.random() ** 2 * (PAGES // BATCH)) * BATCH
                if rng.random() < 0.4:
                    await self._bounded("store", self._store(session, first))
                else:
                    other = self.sources["b" if name == "a" else "a"]
                    await self._bounded("load", self._load(session, first, (other,)))
            except KvPoolError as error:
                self.counts[f"error {error.reason}"] += 1
                await asyncio.sleep(0.05)
        if session is not None:
            await session.close()

    async def _bounded(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        self.counts[f"{name}s"] += 1
        try:
            async with asyncio.timeout(DEADLINE_S + MARGIN_S):
                return await work
        except TimeoutError:
            self.counts["hung_calls"] += 1
            raise DeadlineExceeded(f"{name} hung") from None

    async def _connected(self, name: str, session: PageStoreSession | None) -> PageStoreSession:
        if session is None:
            return await self.cluster.open(name)
        return await session.reopen(drained=True) if session.broken.is_set() else session

    async def _store(self, session: PageStoreSession, first: int) -> None:
        numbers = range(first, first + BATCH)
        results = await session.reserve([ReserveItem(page_key(one), PAGE_BYTES, metadata(one)) for one in numbers])
        leases = []
        for page, result in zip(numbers, results, strict=True):
            if result.slot is not None:
                with session.slot_view(*result.slot.place) as view:
                    fill_page(view, page_key(page))
                leases.append(result.slot.lease_id)
                await asyncio.sleep(0)
        failed = await session.commit(leases)
        self.counts["stored_pages"] += len(leases) - len(failed)
        self.counts["wrong_bytes"] += sum(isinstance(error, PageCorrupt) for _, error in failed)

    async def _load(self, session: PageStoreSession, first: int, sources: tuple[RemoteSource, ...]) -> None:
        items = [AcquireItem(page_key(one), sources, metadata(one)) for one in range(first, first + BATCH)]
        async with session.acquire(items, wait_s=5.0) as answers:
            async for answer in answers:
                if answer.slot is None:
                    self.counts["misses"] += 1
                    continue
                with session.slot_view(*answer.slot.place) as view:
                    right = view == sealed_page(page_key(first + answer.item_index))
                self.counts["hits"] += 1
                self.counts["wrong_bytes"] += not right
                session.release_soon([answer.slot.lease_id])

    async def leaks(self) -> dict[str, int]:
        """What is still held after the last request; empty if nothing."""
        found: dict[str, int] = {}
        for name in "ab":
            with suppress(AssertionError, TimeoutError):
                await self.cluster.at_rest(name)
                continue
            found[name] = 1
        return found


async def run(cluster: CrashCluster, minutes: float, clients: int, seed: int) -> dict[str, object]:
    soak = Soak(cluster, seed)
    soak.sources = {name: cluster.source(name) for name in "ab"}
    tasks = [asyncio.create_task(soak.client(number)) for number in range(clients)]
    await soak.kill_at_random(time.monotonic() + minutes * 60)
    soak.ended = True
    _, late = await asyncio.wait(tasks, timeout=2 * (DEADLINE_S + MARGIN_S))
    for task in set(tasks) - late:
        task.result()
    leaks = await soak.leaks()
    for name in ("wrong_bytes", "hung_calls"):
        soak.counts[name] += 0
    soak.counts["hung_calls"] += len(late)
    return {**dict(sorted(soak.counts.items())), "clients_that_never_ended": len(late), "pagestores_with_leaks": leaks}


def main() -> int:
    """Exit code 1 if anything broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvpool-soak-") as directory, crash_cluster(Path(directory)) as cluster:
        counts = asyncio.run(run(cluster, options.minutes, options.clients, options.seed))
    command = f"python -m bench.soak --minutes {options.minutes:g} --clients {options.clients} --seed {options.seed}"
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": "2-core virtual machine",
        "command": command,
        "client_timeouts_s": {"call": CLIENT.call_timeout_s, "connect": CLIENT.connect_timeout_s},
        **counts,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    broken = counts["wrong_bytes"] or counts["hung_calls"] or counts["pagestores_with_leaks"]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""Real pagestores that copy pages to each other, and are killed, stopped, drained and joined while they do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from kvpool.client.index import IndexClient
from kvpool.client.pagestore import PageStoreSession
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import ChainQuery, NodeKind, RemoteSource
from kvpool.core.errors import ArenaFull, DrainBlocked, KvPoolError
from kvpool.core.outcome import Tier
from kvpool.core.placement import place
from kvpool.testing import eventually, eventually_sync
from tests.fixtures.pagestore import KEYSPACE, SPEC, TENANT, metadata, page_key, shared_memory_directory
from tests.fixtures.pagestore_process import CLIENT, Process, environment, read, start_process, write
from tests.fixtures.patience import LEASE_TTL_MS, PATIENCE_S, SERVICES_MS, patient

pytestmark = pytest.mark.e2e

BATCH = 16
NUMBERS = range(6 * BATCH)


@dataclass(slots=True)
class Fleet:
    """An index and pagestores, each on a host of its own."""

    directory: Path
    shm: Path
    endpoint: str
    index: IndexClient
    stack: AsyncExitStack
    stores: list[Process] = field(default_factory=list)

    def start(self, *flags: str) -> Process:
        name = f"store-{len(self.stores)}"
        given = ("--index-endpoints", self.endpoint, "--host-id", name, "--sweep-interval-ms", "500")
        patient = ("--index-timeout-ms", SERVICES_MS)
        store = start_process(self.directory / name, self.shm, *given, *patient, *flags)
        self.stack.callback(store.kill)
        self.stores.append(store)
        return store

    async def session(self, store: Process) -> PageStoreSession:
        session = await store.open()
        self.stack.push_async_callback(_close, session)
        return session

    def control(self, store: Process) -> PageStoreControl:
        control = PageStoreControl(store.endpoint, CLIENT)
        self.stack.push_async_callback(control.close)
        return control

    async def fill(self, store: Process, numbers: range = NUMBERS) -> None:
        session, control = await self.session(store), self.control(store)
        for start in range(numbers.start, numbers.stop, BATCH):
            await write(session, range(start, start + BATCH))
        await control.flush()

    async def nodes_with(self, number: int, tier: Tier = Tier.DISK) -> set[str]:
        """Node ids of those that the index names for a page."""
        query = ChainQuery(
            keyspace=KEYSPACE,
            chunk_hashes=page_key(number).chunk_hash,
            first_chunk_index=number,
            group_head_hash=metadata(number).group_head_hash,
            shards=1,
        )
        try:
            match = await self.index.match(query)
        except KvPoolError:
            return set()
        return {one.node_id.hex() for run in match.runs for one in run.locations if one.tier is tier}

    async def sources(self, number: int) -> tuple[RemoteSource, ...]:
        """What a match names for a page, as an engine's agent would."""
        ids = await self.nodes_with(number)
        return tuple(source(store) for store in self.stores if store.ready["node_id"] in ids)

    async def sources_of(self, numbers: Sequence[int]) -> dict[int, tuple[RemoteSource, ...]]:
        """`sources` of each."""
        return dict(zip(numbers, await asyncio.gather(*(self.sources(one) for one in numbers)), strict=True))

    async def nodes_of(self, numbers: Sequence[int]) -> list[set[str]]:
        """`nodes_with` of each."""
        return await asyncio.gather(*(self.nodes_with(number) for number in numbers))

    async def copies(self, numbers: Sequence[int], count: int) -> bool:
        return all(len(one) >= count for one in await self.nodes_of(numbers))


def source(store: Process) -> RemoteSource:
    return RemoteSource(
        node_id=bytes.fromhex(store.ready["node_id"]),
        incarnation=store.ready["incarnation"],
        bulk_endpoint=store.ready["bulk_endpoint"],
    )


async def _close(session: PageStoreSession) -> None:
    with contextlib.suppress(KvPoolError):
        await session.close()


def start_index(ready: Path, stack: AsyncExitStack, lease_ttl_ms: int) -> str:
    """Its endpoint."""
    argv = [sys.executable, "-m", "kvpool_index.main", "--listen", "127.0.0.1:0", "--tenant", TENANT]
    argv += ["--lease-ttl-ms", str(lease_ttl_ms), "--ready-file", str(ready)]
    process = subprocess.Popen(argv, env=environment())
    stack.callback(process.wait, 60)
    stack.callback(process.kill)
    eventually_sync(ready.exists)
    endpoint: str = json.loads(ready.read_text())["endpoint"]
    return endpoint


@asynccontextmanager
async def fleet(tmp_path: Path, lease_ttl_ms: int = LEASE_TTL_MS) -> AsyncIterator[Fleet]:
    """lease_ttl_ms: of nodes that are to be missed soon. Everything is killed in the end."""
    async with AsyncExitStack() as stack:
        shm = stack.enter_context(shared_memory_directory())
        endpoint = start_index(tmp_path / "index.ready", stack, lease_ttl_ms)
        index = IndexClient(patient(index_endpoints=(endpoint,)))
        stack.push_async_callback(index.close)
        await index.open_keyspace("test", SPEC)
        yield Fleet(tmp_path, shm, endpoint, index, stack)


async def hits(reader: PageStoreSession, numbers: range, sources: Mapping[int, tuple[RemoteSource, ...]]) -> int:
    """How many of the pages a reader gets, verified; those that it does not get are listed on stderr.

    sources: of each page. Pages that follow each other are read together if they have the same ones: a group need not
    be in one place, as members may have come while it was copied.
    """
    found = 0
    for start in range(numbers.start, numbers.stop, BATCH):
        part = range(start, min(numbers.stop, start + BATCH))
        for places, run in groupby(part, key=sources.__getitem__):
            pages = list(run)
            results = await read(reader, range(pages[0], pages[-1] + 1), *places)
            found += sum(one.slot is not None for one in results)
            for number, one in zip(pages, results, strict=True):
                if one.slot is None:
                    print(f"page {number}: {one.error!r} of {places}", file=sys.stderr)
    return found


async def test_two_copies_survive_the_loss_of_either_without_a_miss(tmp_path: Path) -> None:
    async with fleet(tmp_path, lease_ttl_ms=5000) as cluster:  # a machine that stands still misses shorter ones
        flags = ("--replication-factor", "2", "--replica-linger-ms", "10")
        first, *_ = (cluster.start(*flags) for _ in range(3))
        await cluster.fill(first)
        await eventually(lambda: cluster.copies(NUMBERS, 2))
        first.kill()
        reader = await cluster.session(cluster.start())
        sources: dict[int, tuple[RemoteSource, ...]] = {}

        async def all_are_named() -> bool:
            """Of a node that lives; this machine may stand still for as long as a lease."""
            sources.update(await cluster.sources_of(NUMBERS))
            lost = bytes.fromhex(first.ready["node_id"])
            return all({one.node_id for one in found} - {lost} for found in sources.values())

        await eventually(all_are_named)
        assert await hits(reader, NUMBERS, sources) == len(NUMBERS)
        # A second copy comes again by itself, from those that are left.
        await eventually(lambda: cluster.copies(NUMBERS, 2))


async def test_a_drain_under_load_loses_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path) as cluster:
        first, second, _ = (cluster.start() for _ in range(3))
        await cluster.fill(first)
        reader = await cluster.session(first)
        writer = await cluster.session(second)
        stop = asyncio.Event()

        async def load() -> int:
            """Reads of the node that is drained, and writes to another one, until asked to stop."""
            missed, number = 0, 10_000
            while not stop.is_set():
                results = await read(reader, NUMBERS[:BATCH])
                missed += sum(one.slot is None for one in results)
                try:
                    await write(writer, range(number, number + 4))
                except ArenaFull:  # the disk is slower than the writer
                    await asyncio.sleep(0.1)
                number += 4
            return missed

        loading = asyncio.ensure_future(load())
        argv = [sys.executable, "-m", "kvpool_cli", "node", "drain", "store-0", "--index", cluster.endpoint, "--json"]
        drain = await asyncio.create_subprocess_exec(
            *argv, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, errors = await asyncio.wait_for(drain.communicate(), 3 * PATIENCE_S)
        stop.set()
        assert await loading == 0, "a node serves reads while and after it is drained"
        assert drain.returncode == 0, errors.decode()
        (reported,) = json.loads(output)["nodes"]
        assert (reported["host_id"], reported["moved_pages"], reported["error"]) == ("store-0", len(NUMBERS), "")
        assert reported["done"] and not reported["remaining_chunks"]
        left = {store.ready["node_id"] for store in cluster.stores[1:]}
        for number in NUMBERS:
            named = await cluster.nodes_with(number)
            assert named and named <= left, number
        assert (await cluster.control(first).status()).draining
        first.kill()
        elsewhere = await cluster.session(cluster.start())
        sources = await cluster.sources_of(NUMBERS)
        for _ in range(int(PATIENCE_S)):  # a node whose arena is full of what the writer left cannot read at first
            if (found := await hits(elsewhere, NUMBERS, sources)) == len(NUMBERS):
                break
            await asyncio.sleep(1.0)
        assert found == len(NUMBERS)


async def test_a_drain_goes_on_after_its_node_was_killed_in_the_middle(tmp_path: Path) -> None:
    async with fleet(tmp_path) as cluster:
        first, _ = cluster.start(), cluster.start()
        await cluster.fill(first)
        with contextlib.suppress(KvPoolError):
            async for progress in cluster.control(first).drain(timeout_s=60):
                if progress.moved_page_count:
                    first.kill()
        again = start_process(
            tmp_path / "store-0", cluster.shm, "--index-endpoints", cluster.endpoint, "--host-id", "store-0"
        )
        cluster.stack.callback(again.kill)
        other = cluster.stores[1].ready["node_id"]

        async def is_moved() -> bool:
            return all(nodes == {other} for nodes in await cluster.nodes_of(NUMBERS))

        await eventually(is_moved, 3 * PATIENCE_S)  # without another request
        reported = [progress async for progress in cluster.control(again).drain(timeout_s=60)]
        assert reported[-1].done and reported[-1].moved_page_count <= len(NUMBERS)


async def test_a_drain_without_another_node_says_so_and_can_be_cancelled(tmp_path: Path) -> None:
    async with fleet(tmp_path) as cluster:
        only = cluster.start()
        await cluster.fill(only, range(BATCH))
        control = cluster.control(only)
        with pytest.raises(DrainBlocked, match="no other pagestore has room"):
            async for _ in control.drain(timeout_s=60):
                pass
        assert (await control.status()).draining
        assert [progress.done async for progress in control.drain(cancel=True)] == [True]
        assert not (await control.status()).draining
        await write(await cluster.session(only), range(100, 104))


async def test_a_source_that_is_stopped_is_overtaken_by_another(tmp_path: Path) -> None:
    async with fleet(tmp_path) as cluster:
        flags = ("--replication-factor", "2", "--replica-linger-ms", "10")
        first, second = cluster.start(*flags), cluster.start(*flags)
        await cluster.fill(first)
        await eventually(lambda: cluster.copies(NUMBERS, 2))
        reader = await cluster.session(cluster.start("--hedge-ms", "100", "--pull-timeout-ms", "600000"))
        os.kill(first.child.pid, signal.SIGSTOP)
        try:
            sources = dict.fromkeys(NUMBERS, (source(first), source(second)))
            # The deadline of a pull is longer than the patience of the reader.
            assert await hits(reader, NUMBERS[: 2 * BATCH], sources) == 2 * BATCH
        finally:
            os.kill(first.child.pid, signal.SIGCONT)


async def test_a_source_that_dies_in_the_middle_costs_only_what_had_not_come(tmp_path: Path) -> None:
    async with fleet(tmp_path) as cluster:
        flags = ("--replication-factor", "2", "--replica-linger-ms", "10")
        first, second = cluster.start(*flags), cluster.start(*flags)
        await cluster.fill(first)
        await eventually(lambda: cluster.copies(NUMBERS, 2))
        reader = await cluster.session(cluster.start())
        sources = dict.fromkeys(NUMBERS, (source(first), source(second)))
        reading = asyncio.ensure_future(hits(reader, NUMBERS, sources))
        await eventually(lambda: cluster.nodes_with(0, Tier.STAGING))
        first.kill()
        assert await reading == len(NUMBERS)


async def test_a_node_that_joins_gets_its_share_and_the_others_give_it_up(tmp_path: Path) -> None:
    async with fleet(tmp_path) as cluster:
        flags = ("--rebalance-bytes-per-s", str(64 << 20), "--sweep-interval-ms", "200")
        first = cluster.start(*flags)
        await cluster.fill(first)
        joined = cluster.start(*flags)
        nodes = [node.info for node in await cluster.index.list_nodes(NodeKind.PAGESTORE)]
        assert {node.node_id.hex() for node in nodes} == {joined.ready["node_id"], first.ready["node_id"]}

        def owner(number: int) -> str:
            """Whose the page is by placement."""
            head = metadata(number).group_head_hash
            (placed,) = place(nodes, keyspace=KEYSPACE, chain_head=head, host_id="", count=1)
            return placed.node_id.hex()

        async def settled() -> bool:
            """Each page is on one disk: that of the node whose it is."""
            found = await cluster.nodes_of(NUMBERS)
            return all(nodes == {owner(number)} for number, nodes in zip(NUMBERS, found, strict=True))

        await eventually(settled, 3 * PATIENCE_S)

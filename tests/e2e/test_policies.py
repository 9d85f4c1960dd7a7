"""Write policies, staging modes and retention on real processes: what is there after a kill, what is matched."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool.client.index import IndexClient
from kvpool.client.pagestore import PageStoreSession
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import ChainQuery, NodeKind
from kvpool.core.errors import KvPoolError
from kvpool.core.outcome import Tier
from kvpool.core.policy import KeyspacePolicy, StagingMode, WritePolicy
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool.testing import eventually
from tests.e2e.test_pagestore_index import start_index
from tests.fixtures.pagestore import KEYSPACE, SPEC, page_key, shared_memory_directory
from tests.fixtures.pagestore_process import CLIENT, Process, read, refused, start_process, write
from tests.fixtures.patience import patient
from tests.fixtures.redis_server import free_port

pytestmark = pytest.mark.e2e

HASHES = [page_key(number).chunk_hash for number in range(16)]


class Node:
    """One pagestore that may be killed and started again."""

    def __init__(self, directory: Path, shm: Path, *flags: str) -> None:
        self._directory, self._shm, self._flags = directory, shm, flags
        self.process = start_process(directory, shm, *flags)

    def killed_and_started_again(self) -> Process:
        self.process.kill()
        self.process = start_process(self._directory, self._shm, *self._flags)
        return self.process


@contextlib.contextmanager
def node(tmp_path: Path, *flags: str) -> Iterator[Node]:
    with shared_memory_directory() as shm:
        made = Node(tmp_path / "store", shm, *flags)
        try:
            yield made
        finally:
            made.process.kill()


@asynccontextmanager
async def index_with(tmp_path: Path, endpoint: str) -> AsyncIterator[IndexClient]:
    process = start_index(endpoint)
    client = IndexClient(patient(index_endpoints=(endpoint,)))

    async def opened() -> bool:
        try:
            await client.open_keyspace("test", SPEC)
        except KvPoolError:
            return False
        return True

    try:
        await eventually(opened, 60)
        yield client
    finally:
        await client.close()
        process.kill()
        process.wait(60)


async def found(session: PageStoreSession, numbers: range) -> list[bool]:
    """Which pages could be read, each verified."""
    return [one.slot is not None for one in await read(session, numbers)]


async def test_a_write_through_page_is_there_after_a_kill_right_after_its_commit(tmp_path: Path) -> None:
    with node(tmp_path, "--write-policy", "write-through", "--linger-ms", "60000") as made:
        session = await made.process.open()
        await write(session, range(4))
        store = made.killed_and_started_again()
        assert await found(await store.open(), range(4)) == [True] * 4


async def test_staging_only_leaves_nothing_for_after_a_kill(tmp_path: Path) -> None:
    with node(tmp_path, "--write-policy", "staging-only") as made:
        session, control = await made.process.open(), PageStoreControl(made.process.endpoint, CLIENT)
        await write(session, range(4))
        assert (await control.flush()).page_count == 0
        status = await control.status()
        assert (status.staging_page_count, status.dirty_page_count, status.disk_page_count) == (4, 0, 0)
        await control.close()
        store = made.killed_and_started_again()
        assert await found(await store.open(), range(4)) == [False] * 4


async def test_selective_keeps_over_a_kill_what_was_used_often_enough(tmp_path: Path) -> None:
    with node(tmp_path, "--write-policy", "selective", "--selective-min-uses", "2") as made:
        session, control = await made.process.open(), PageStoreControl(made.process.endpoint, CLIENT)
        await write(session, range(4))
        for _ in range(2):
            assert await found(session, range(2)) == [True] * 2
        await control.flush()
        await control.close()
        store = made.killed_and_started_again()
        assert await found(await store.open(), range(4)) == [True, True, False, False]


async def test_pins_and_ends_of_life_hold_over_a_kill(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        session, control = await made.process.open(), PageStoreControl(made.process.endpoint, CLIENT)
        await write(session, range(2))
        await control.flush()
        assert await control.pin(KEYSPACE, HASHES[:1], PINNED_FOREVER_US) == 1
        await control.close()
        store = made.killed_and_started_again()
        control = PageStoreControl(store.endpoint, CLIENT)
        assert await control.pin(KEYSPACE, HASHES[:2], 0) == 2
        await control.close()


async def test_an_operators_policy_reaches_nodes_holds_without_the_index_and_transit_is_never_matched(
    tmp_path: Path,
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--index-endpoints", endpoint, "--index-start-wait-ms", "200", "--index-timeout-ms", "500")
    query = ChainQuery(keyspace=KEYSPACE, chunk_hashes=b"".join(HASHES[:4]), shards=1)
    with node(tmp_path, *flags) as made:
        async with index_with(tmp_path, endpoint) as index:
            policy = KeyspacePolicy(write_policy=WritePolicy.WRITE_THROUGH, staging=StagingMode.TRANSIT)
            await index.set_keyspace_policy("test", policy)
            await eventually(lambda: index.list_nodes(NodeKind.PAGESTORE), 30)  # it asks for policies from then on
            session, control = await made.process.open(), PageStoreControl(made.process.endpoint, CLIENT)
            await write(session, range(4))
            status = await control.status()
            assert (status.staging_page_count, status.arena_used_bytes, status.disk_page_count) == (0, 0, 4)

            async def tiers() -> set[Tier]:
                match = await index.match(query)
                return {one.tier for run in match.runs for one in run.locations} if match.matched_chunks == 4 else set()

            assert await eventually(tiers, 30) == {Tier.DISK}
            assert await found(session, range(4)) == [True] * 4
            await control.close()
            assert await tiers() == {Tier.DISK}
        store = made.killed_and_started_again()  # the index is gone too
        session, control = await store.open(), PageStoreControl(store.endpoint, CLIENT)
        await write(session, range(8, 10))
        status = await control.status()
        assert (status.arena_used_bytes, status.disk_page_count) == (0, 6)
        await control.close()


def test_what_would_keep_pages_nowhere_does_not_start(tmp_path: Path) -> None:
    with shared_memory_directory() as shm:
        said = refused(tmp_path / "store", shm, "--staging", "transit", "--write-policy", "staging-only")
    assert "neither tier" in said

"""Every component is killed at every named step of a page's life, started again, and must have kept its promises:
no wrong byte, everything that was acknowledged as durable is served, no call hangs, nothing stays held."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from kvpool.client.index import IndexClient
from kvpool.client.pagestore import PageStoreSession
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import DrainBlocked, KvPoolError
from kvpool.core.fault_points import POINTS
from kvpool.testing import eventually
from tests.e2e.crash_cluster import CLIENT, DIES_WITHIN_S, CrashCluster, FaultyProcess, crash_cluster, hits, store_pages
from tests.fixtures.agent import EngineProcess, prompt, run_load, run_store
from tests.fixtures.pagestore import KEYSPACE, SPEC, page_key
from tests.fixtures.patience import patient

pytestmark = pytest.mark.e2e

_NEVER_HANGS_S = 80.0  # longer than any call may take
_SOME = 12  # pages
_MORE_THAN_FITS = 640  # on the disk tier
_CHUNKS = 4
_numbers = itertools.count(0, 16_000)  # of pages: each case has its own, in chain groups of its own


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashCluster]:
    with crash_cluster(tmp_path_factory.mktemp("crash")) as running:
        yield running


def test_every_point_is_in_the_matrix() -> None:
    assert {*_DURING_USE, *_DURING_START, *_OF_THE_INDEX, *_OF_THE_AGENT} == set(POINTS)


# The pagestore


async def _store(cluster: CrashCluster, session: PageStoreSession, first: int) -> None:
    await store_pages(session, range(first + 100, first + 100 + _SOME))
    await cluster.flush("a")


async def _store_more_than_fits(cluster: CrashCluster, session: PageStoreSession, first: int) -> None:
    for start in range(first + 100, first + 100 + _MORE_THAN_FITS, 64):
        await store_pages(session, range(start, start + 64))
        await cluster.flush("a")


async def _read_from_disk(cluster: CrashCluster, session: PageStoreSession, first: int) -> None:
    await hits(session, range(first, first + _SOME))


async def _read_from_a_peer(cluster: CrashCluster, session: PageStoreSession, first: int) -> None:
    async with _session(cluster, "b") as other:
        await store_pages(other, range(first + 200, first + 200 + _SOME))
    await hits(session, range(first + 200, first + 200 + _SOME), cluster.source("b"))


async def _drain(cluster: CrashCluster, session: PageStoreSession, first: int) -> None:
    control = PageStoreControl(cluster.endpoint("a"), CLIENT)

    async def drained() -> bool:
        try:
            return [progress.done async for progress in control.drain(timeout_s=60)][-1]
        except DrainBlocked:  # the other node's lease has just ended, on a busy machine: an operator asks again
            return False

    try:
        await eventually(drained, _NEVER_HANGS_S)
    finally:
        await control.close()


_Use = Callable[[CrashCluster, PageStoreSession, int], Awaitable[None]]
_DURING_USE: dict[str, _Use] = {
    "pagestore.reserve.granted": _store,
    "pagestore.commit.verified": _store,
    "pagestore.commit.visible": _store,
    "pagestore.write.begin": _store,
    "pagestore.write.synced": _store,
    "pagestore.write.recorded": _store,
    "pagestore.write.durable": _store,
    "pagestore.evict.delete": _store_more_than_fits,
    "pagestore.promote.read": _read_from_disk,
    "pagestore.pull.received": _read_from_a_peer,
    "pagestore.push.start": _drain,
    "pagestore.push.end": _drain,
}
_DURING_START = ("pagestore.register.granted", "pagestore.incarnation.saved")


# What fills the disk comes last: nothing could be drained from a full one to another of its size.
@pytest.mark.parametrize("point", sorted(_DURING_USE, key=lambda point: (point == "pagestore.evict.delete", point)))
async def test_a_pagestore_dies_in_use(cluster: CrashCluster, point: str) -> None:
    store, first = cluster.stores["a"], next(_numbers)
    store.wait_ready()
    async with _session(cluster, "a") as session:
        await store_pages(session, range(first, first + _SOME))
    await cluster.flush("a")
    store.restart(f"{point}:kill")
    before = store.wait_ready()["incarnation"]
    session = await cluster.open("a")
    using = asyncio.ensure_future(_DURING_USE[point](cluster, session, first))
    await _dies(store)
    store.start()
    assert store.wait_ready()["incarnation"] > before
    async with asyncio.timeout(_NEVER_HANGS_S):
        with suppress(KvPoolError):
            await using
    if _DURING_USE[point] is _drain:  # it went on by itself; what was drained takes pages again when it is restarted
        await _drain(cluster, session, first)
        store.restart()
        store.wait_ready()
    session = await session.reopen(drained=True)
    durable = set(range(first, first + _SOME))
    if point != "pagestore.evict.delete":  # which makes room by giving up what was used longest ago
        assert await hits(session, sorted(durable)) == durable
    await hits(session, range(first + 100, first + 100 + _SOME))  # right bytes or none
    await store_pages(session, range(first + 300, first + 300 + _SOME))
    assert await session.close()
    await cluster.at_rest("a")


@pytest.mark.parametrize("point", _DURING_START)
async def test_a_pagestore_dies_while_it_starts(cluster: CrashCluster, point: str) -> None:
    store, first = cluster.stores["b"], next(_numbers)
    before = store.wait_ready()["incarnation"]
    async with _session(cluster, "b") as session:
        await store_pages(session, range(first, first + _SOME))
    await cluster.flush("b")
    store.restart(f"{point}:kill")
    await _dies(store)
    store.start()
    assert store.wait_ready()["incarnation"] > before
    async with _session(cluster, "b") as session:
        assert await hits(session, range(first, first + _SOME)) == set(range(first, first + _SOME))
    await cluster.at_rest("b")


# The index

_OF_THE_INDEX = ("index.announce.begin", "index.announce.applied", "index.announce.logged")


@pytest.mark.parametrize("point", _OF_THE_INDEX)
async def test_an_index_dies_and_nothing_that_was_announced_is_lost(cluster: CrashCluster, point: str) -> None:
    first = next(_numbers)
    client = IndexClient(patient(index_endpoints=(cluster.index_endpoint,), call_timeout_s=5.0))
    cluster.stores["b"].wait_ready()
    cluster.index.restart(f"{point}:kill")
    cluster.index.wait_ready()
    with suppress(KvPoolError):  # it may be dead by now: nodes that come back announce too
        await client.open_keyspace("matrix", SPEC)
    async with _session(cluster, "b") as session:
        await store_pages(session, range(first, first + 4))
    await _dies(cluster.index)
    cluster.index.start()
    cluster.index.wait_ready()
    hashes = b"".join(page_key(number).chunk_hash for number in range(first, first + 4))
    await client.open_keyspace("matrix", SPEC, timeout_s=60)

    async def all_is_found() -> bool:
        with suppress(KvPoolError):
            query = ChainQuery(keyspace=KEYSPACE, chunk_hashes=hashes, shards=1)
            return (await client.match(query, timeout_s=60)).matched_chunks == 4
        return False

    await eventually(all_is_found)
    await client.close()
    await cluster.at_rest("b")


# The agent

_OF_THE_AGENT = ("gpuagent.store.gathered", "gpuagent.store.committing", "gpuagent.store.committed")


@pytest.fixture(scope="module")
def agent(cluster: CrashCluster) -> FaultyProcess:
    return cluster.agent()


@pytest.mark.parametrize("point", _OF_THE_AGENT)
async def test_an_agent_dies_and_its_slots_come_back(cluster: CrashCluster, agent: FaultyProcess, point: str) -> None:
    seed = next(_numbers) // 16_000
    cluster.stores["a"].wait_ready()
    agent.restart(f"{point}:kill")
    agent.wait_ready()
    engine = EngineProcess(f"unix:{cluster.socket('agent')}", chunk_count=_CHUNKS)
    session = await engine.open(CLIENT)
    chain = prompt(session, _CHUNKS, seed)
    engine.compute(chain, range(_CHUNKS))
    async with asyncio.timeout(_NEVER_HANGS_S):
        with suppress(KvPoolError):
            await run_store(session, engine.span(chain, range(_CHUNKS)))
    await _dies(agent)
    await session.close()
    engine.close()
    await cluster.at_rest("a")  # the kernel said that the agent is gone
    agent.start()
    agent.wait_ready()
    engine = EngineProcess(f"unix:{cluster.socket('agent')}", chunk_count=_CHUNKS)
    session = await engine.open(CLIENT)
    engine.compute(chain, range(_CHUNKS))
    await run_store(session, engine.span(chain, range(_CHUNKS)))
    engine.clear()
    outcome = await run_load(session, engine.span(chain, range(_CHUNKS)))
    assert outcome.failed_chunks == () and engine.holds(chain, range(_CHUNKS))
    assert await session.close()
    engine.close()
    agent.kill()
    await cluster.at_rest("a")


@asynccontextmanager
async def _session(cluster: CrashCluster, name: str) -> AsyncIterator[PageStoreSession]:
    session = await cluster.open(name)
    try:
        yield session
    finally:
        await session.close()


async def _dies(process: FaultyProcess) -> None:
    """It ends by SIGKILL, by itself: else the point was not reached."""
    try:
        ended = await asyncio.to_thread(process.wait, DIES_WITHIN_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running: {process.log()}")
    assert ended == -signal.SIGKILL, process.log()


async def test_a_pagestore_that_comes_back_has_its_memory_again_beside_an_idle_agent(
    cluster: CrashCluster, agent: FaultyProcess
) -> None:
    store, first = cluster.stores["a"], next(_numbers)
    store.wait_ready()
    agent.restart()
    agent.wait_ready()
    engine = EngineProcess(f"unix:{cluster.socket('agent')}", chunk_count=_CHUNKS)
    session = await engine.open(CLIENT)
    chain = prompt(session, _CHUNKS, first // 16_000)
    engine.compute(chain, range(_CHUNKS))
    await run_store(session, engine.span(chain, range(_CHUNKS)))
    store.restart()
    await asyncio.to_thread(store.wait_ready)  # the session goes on saying that it is there
    control = PageStoreControl(cluster.endpoint("a"), CLIENT)

    async def agent_is_back() -> bool:
        status = await control.status()
        return (status.session_count, status.arena_quarantined_bytes) == (1, 0)

    await eventually(agent_is_back)
    await control.close()
    async with _session(cluster, "a") as own:
        await store_pages(own, range(first, first + _SOME))
    assert await session.close()
    engine.close()
    agent.kill()
    await cluster.at_rest("a")

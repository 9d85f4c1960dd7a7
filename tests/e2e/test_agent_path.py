"""Engines, agents, pagestores and an index as processes: the bytes that go in come out, and kills cost chunks only."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.gpuagent import EngineSession
from kvpool.client.index import IndexClient
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import KvPoolError
from kvpool.testing import eventually
from tests.e2e.service_processes import Process, ServiceCluster, service_cluster
from tests.fixtures.agent import EngineProcess, prompt, run_load, run_store
from tests.fixtures.patience import patient
from tests.fixtures.raw_engine import raw_engine

pytestmark = pytest.mark.e2e

CHUNKS = 10
CLIENT = patient()


def engine_of(cluster: ServiceCluster, agent: str) -> EngineProcess:
    return EngineProcess(f"unix:{cluster.socket(f'{agent}.agent')}", chunk_count=2 * CHUNKS)


def control_of(store: Process) -> PageStoreControl:
    return PageStoreControl(store.ready["endpoint"], CLIENT)


async def all_known(session: EngineSession, hashes: Any) -> None:
    """Until the session's agent knows of all chunks: they are announced after a store, in parts."""

    async def is_known() -> bool:
        return (await session.match(hashes)).matched_chunks == CHUNKS

    await eventually(is_known)


async def test_what_one_host_stores_all_others_load(tmp_path: Path) -> None:
    with service_cluster(tmp_path) as cluster:
        for host in ("a", "b"):
            cluster.pagestore(host)
            cluster.agent(host, host=host)
        bare_process = cluster.agent("bare")
        cluster.wait_ready()
        engines = {name: engine_of(cluster, name) for name in ("a", "b", "bare")}
        sessions = {name: await engine.open(CLIENT) for name, engine in engines.items()}
        chain = prompt(sessions["a"], CHUNKS)
        engines["a"].compute(chain, range(CHUNKS))
        stored = await run_store(sessions["a"], engines["a"].span(chain, range(CHUNKS)))
        assert stored.stored_chunks == CHUNKS
        sources = {"a": "staging", "b": "remote", "bare": "remote"}
        for name, session in sessions.items():
            await all_known(session, chain.hashes)
            engines[name].clear()
            loaded = await run_load(session, engines[name].span(chain, range(CHUNKS), at=CHUNKS))
            assert loaded.loaded_chunks == CHUNKS, (name, loaded)
            assert getattr(loaded.tokens, sources[name]) == CHUNKS * 32
            assert engines[name].holds(chain, range(CHUNKS), at=CHUNKS)
        # b has pulled the pages to itself.
        assert (await run_load(sessions["b"], engines["b"].span(chain, [0]))).tokens.staging == 32

        # An agent without a pagestore stores by streams, and knows what is there already.
        other = prompt(sessions["bare"], CHUNKS, seed=2)
        engines["bare"].compute(other, range(CHUNKS))
        stored = await run_store(sessions["bare"], engines["bare"].span(other, range(CHUNKS)))
        assert stored.stored_chunks == CHUNKS
        await all_known(sessions["bare"], other.hashes)
        again = await run_store(sessions["bare"], engines["bare"].span(other, range(CHUNKS)))
        assert again.deduplicated_chunks == CHUNKS
        await all_known(sessions["a"], other.hashes)
        assert (await run_load(sessions["a"], engines["a"].span(other, range(CHUNKS)))).loaded_chunks == CHUNKS
        assert engines["a"].holds(other, range(CHUNKS))
        for name, session in sessions.items():
            assert await session.close(), name
            engines[name].close()
        assert bare_process.stop() == 0


async def test_a_killed_pagestore_costs_chunks_and_comes_back(tmp_path: Path) -> None:
    with service_cluster(tmp_path) as cluster:
        store = cluster.pagestore("a")
        cluster.agent("a", host="a")
        cluster.wait_ready()
        engine = engine_of(cluster, "a")
        session = await engine.open(CLIENT)
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        await run_store(session, engine.span(chain, range(CHUNKS)))
        control = control_of(store)
        await control.flush()
        await control.close()

        # A pagestore that stands still: the load waits on it, and fails when it is killed.
        store.send(signal.SIGSTOP)
        waiting = await session.load(engine.span(chain, range(CHUNKS)), wait_s=60)
        store.kill()
        outcome = await waiting.done(60)
        assert outcome.loaded_chunks < CHUNKS
        assert outcome.failed_chunks == tuple(range(outcome.loaded_chunks, CHUNKS))
        assert waiting.released
        stored = await run_store(session, engine.span(chain, range(CHUNKS)))
        assert set(stored.failed_chunks) == set(range(CHUNKS))

        store.start()
        await asyncio.to_thread(store.wait_ready)  # the session goes on saying that it is there
        engine.clear()

        async def loads_again() -> bool:
            loaded = await run_load(session, engine.span(chain, range(CHUNKS)))
            return bool(loaded.loaded_chunks == CHUNKS and loaded.tokens.disk)

        await eventually(loads_again)
        assert engine.holds(chain, range(CHUNKS))
        assert await session.close()
        engine.close()


async def test_an_agent_killed_between_reserve_and_commit_leaves_nothing(tmp_path: Path) -> None:
    with service_cluster(tmp_path) as cluster:
        store = cluster.pagestore("a")
        agent = cluster.agent("a", host="a")
        cluster.wait_ready()
        engine = engine_of(cluster, "a")
        control, index = (
            control_of(store),
            IndexClient(patient(index_endpoints=(cluster.index.ready["endpoint"],))),
        )
        session = await engine.open(CLIENT)
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        span = engine.span(chain, range(CHUNKS))

        def killed(chunk_count: int) -> bool:
            """Now everything is gathered, and nothing committed."""
            agent.kill()
            return True

        handle = await session.store(span, kept=killed)
        with pytest.raises(KvPoolError):
            await handle.done(60)
        # Its process is gone, so nothing touches the engine's blocks any more.
        await asyncio.wait_for(handle.wait_released(), 60)
        await asyncio.wait_for(session.released.wait(), 60)

        async def slots_are_back() -> bool:
            status = await control.status()
            return not status.lease_count and not status.arena_quarantined_bytes and not status.session_count

        await eventually(slots_are_back)
        assert (await control.status()).staging_page_count == 0
        query = ChainQuery(keyspace=session.keyspace, chunk_hashes=b"".join(chain.hashes))
        assert (await index.match(query, timeout_s=60)).matched_chunks == 0

        agent.start()
        agent.wait_ready()
        again = await session.reopen()
        assert (await run_store(again, span)).stored_chunks == CHUNKS
        engine.clear()
        assert (await run_load(again, span)).loaded_chunks == CHUNKS
        assert engine.holds(chain, range(CHUNKS))
        assert await again.close()
        await control.close()
        await index.close()
        engine.close()


async def test_a_stopped_agent_ends_its_sessions_and_says_why(tmp_path: Path) -> None:
    with service_cluster(tmp_path) as cluster:
        agent = cluster.agent("bare", drain_s="5")
        cluster.wait_ready()
        engine = engine_of(cluster, "bare")
        async with raw_engine(f"unix:{cluster.socket('bare.agent')}") as raw:
            await raw.ready(engine)
            assert agent.stop() == 0
            error = await raw.end()
            assert error is not None
            assert error.reason == "DRAINING"
        assert not any(region.is_lent() for region in engine.regions)
        assert not cluster.socket("bare.agent").exists()
        assert not cluster.socket("bare.agent.fds").exists()
        engine.close()

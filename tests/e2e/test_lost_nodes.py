"""Nodes and stores that go: what matches say of a killed pagestore, and of a Redis that is not there."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Prompt
from kvpool.client.index import IndexClient
from kvpool.connectors.transformers import SharedPrefixGenerator
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import StoreUnavailable
from kvpool.testing import eventually, eventually_sync
from tests.e2e.cli_cluster import SMALL, Cluster
from tests.e2e.service_processes import service_cluster
from tests.fixtures.agent import EngineProcess, prompt, run_load, run_store
from tests.fixtures.patience import PATIENCE_S, patient
from tests.unit.connectors.tiny_models import prompt as token_ids
from tests.unit.connectors.tiny_models import tiny_llama

pytestmark = pytest.mark.e2e

CHUNKS = 4
LEASE_TTL_MS = 1000
CLIENT = patient()


async def test_a_killed_pagestore_leaves_matches_within_its_lease_and_engines_go_on(tmp_path: Path) -> None:
    with service_cluster(tmp_path, lease_ttl_ms=LEASE_TTL_MS) as cluster:
        store = cluster.pagestore("a")
        cluster.agent("a", host="a")
        cluster.wait_ready()
        engine = EngineProcess(f"unix:{cluster.socket('a.agent')}", chunk_count=CHUNKS)
        session = await engine.open(CLIENT)
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        await run_store(session, engine.span(chain, range(CHUNKS)))
        index = IndexClient(patient(index_endpoints=(cluster.index.ready["endpoint"],)))
        (keyspace,) = await index.list_keyspaces()
        query = ChainQuery(keyspace=keyspace.keyspace, chunk_hashes=b"".join(chain.hashes), shards=0)

        async def matched_chunks() -> int:
            return (await index.match(query)).matched_chunks

        await eventually(matched_chunks)
        store.kill()

        async def gone() -> bool:
            return await matched_chunks() == 0

        await eventually(gone, LEASE_TTL_MS / 1e3 + PATIENCE_S)

        async def gone_at_the_agent() -> bool:  # which learns it from the watch
            return (await session.match(chain.hashes)).matched_chunks == 0

        await eventually(gone_at_the_agent)
        outcome = await run_load(session, engine.span(chain, range(CHUNKS)))
        assert outcome.failed_chunks == tuple(range(CHUNKS)) and outcome.error is not None
        assert await session.close()
        await index.close()
        engine.close()


def generate(generator: SharedPrefixGenerator, input_ids: Any) -> tuple[list[int], Any]:
    result = generator.generate(input_ids, max_new_tokens=6, do_sample=False)
    return result.sequences[0].tolist(), result.stats


def connect(cluster: Cluster, model: Any) -> SharedPrefixGenerator:
    socket = cluster.state.of_role("agent")[0].endpoints["socket"]
    options: dict[str, Any] = {"model_id": "tiny", "keyspace_name": "tiny-hf", "chunk_tokens": 16, "always_load": True}
    return SharedPrefixGenerator.connect(
        model, f"unix:{socket}", cache_bytes=4 << 20, connect_timeout_s=PATIENCE_S, **options
    )


async def fails_fast(index: IndexClient, keyspace: bytes) -> None:
    """That is, by the index, and not when the time of the call is over."""
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StoreUnavailable):
            await index.match(ChainQuery(keyspace=keyspace, chunk_hashes=bytes(16), shards=0), timeout_s=3600)


async def is_known_to_the_agent(cluster: Cluster, session: EngineSession, chain: Prompt) -> None:
    """Wait until the agent itself knows where a chain is: it answers for the index."""
    (agent,) = cluster.state.of_role("agent")

    def answered() -> float:
        with urllib.request.urlopen(agent.endpoints["metrics_url"], timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        name, label = "kvpool_gpuagent_replica_matches_total{", 'answered_by="replica"'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)

    async def answers() -> bool:
        before = await asyncio.to_thread(answered)
        await session.match(chain.hashes)
        return await asyncio.to_thread(answered) > before

    await eventually(answers)


async def knows_nothing_current(session: EngineSession, chain: Prompt) -> None:
    """Wait until the agent's own knowledge of locations is too old to be used."""

    async def refused() -> bool:
        try:
            await session.match(chain.hashes)
        except StoreUnavailable:
            return True
        return False

    await eventually(refused)


async def test_without_redis_matches_fail_fast_engines_recompute_and_all_comes_back(tmp_path: Path) -> None:
    cluster, model, input_ids = Cluster(tmp_path, patient_services=False), tiny_llama(), token_ids(4 * 16 + 3, seed=1)
    cluster.run("cluster", "up", "--detach", *SMALL)
    try:
        with connect(cluster, model) as first:
            expected, _ = generate(first, input_ids)
            assert first.flush_stores(PATIENCE_S)
        processes = {process.name: process.pid for process in cluster.state.processes}
        index = IndexClient(patient(index_endpoints=(cluster.state.of_role("index")[0].endpoints["endpoint"],)))
        (keyspace,) = await index.list_keyspaces()
        engine = EngineProcess(f"unix:{cluster.state.of_role('agent')[0].endpoints['socket']}", chunk_count=CHUNKS)
        session = await engine.open(CLIENT)
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        await run_store(session, engine.span(chain, range(CHUNKS)))
        await is_known_to_the_agent(cluster, session, chain)  # else a refusal says nothing of other chains
        # Beside the loop, on which the session says that it is there.
        with await asyncio.to_thread(connect, cluster, model) as second:
            os.kill(processes["redis"], signal.SIGSTOP)
            try:
                await fails_fast(index, keyspace.keyspace)
                await knows_nothing_current(session, chain)
                tokens, stats = await asyncio.to_thread(generate, second, input_ids)
                assert tokens == expected and stats.failure
                assert stats.prompt_tokens.recomputed == input_ids.shape[1]
            finally:
                os.kill(processes["redis"], signal.SIGCONT)

        def shared_again() -> bool:
            with connect(cluster, model) as third:
                tokens, stats = generate(third, input_ids)
                assert tokens == expected
                return bool(stats.prompt_tokens.staging == 4 * 16)

        eventually_sync(shared_again)
        # Then it dies, and comes back (started again by `up`) without what it knew.
        os.kill(processes["redis"], signal.SIGKILL)
        eventually_sync(shared_again, 60)

        def restarted() -> set[str]:
            return {process.name for process in cluster.state.processes if process.pid != processes[process.name]}

        eventually_sync(restarted)
        assert restarted() == {"redis"}, "the others recover without a restart"
        await session.close()
        engine.close()
        await index.close()
    finally:
        cluster.run("cluster", "down")

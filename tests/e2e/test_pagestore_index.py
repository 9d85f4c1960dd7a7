"""A pagestore whose index comes late: it serves before, and is found afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.client.index import IndexClient
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import KvPoolError
from kvpool.core.outcome import Tier
from kvpool.testing import eventually
from tests.fixtures.pagestore import KEYSPACE, SPEC, TENANT, page_key, shared_memory_directory
from tests.fixtures.pagestore_process import CLIENT, environment, start_process, write
from tests.fixtures.patience import LEASE_TTL_MS, patient
from tests.fixtures.redis_server import free_port

pytestmark = pytest.mark.e2e


def start_index(endpoint: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "kvpool_index.main", "--listen", endpoint, "--tenant", TENANT]
    argv += ["--lease-ttl-ms", str(LEASE_TTL_MS)]
    return subprocess.Popen(argv, env=environment())


async def test_a_store_that_started_without_its_index_is_found_under_a_higher_incarnation(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with shared_memory_directory() as shm, contextlib.ExitStack() as stack:
        flags = ("--index-endpoints", endpoint, "--index-start-wait-ms", "100", "--index-timeout-ms", "500")
        store = start_process(tmp_path / "store", shm, *flags)
        stack.callback(store.kill)
        session, control = await store.open(), PageStoreControl(store.endpoint, CLIENT)
        await write(session, range(3))
        await control.flush()
        index_process = start_index(endpoint)
        stack.callback(index_process.wait, 60)
        stack.callback(index_process.kill)
        index = IndexClient(patient(index_endpoints=(endpoint,)))
        hashes = b"".join(page_key(one).chunk_hash for one in range(3))
        query = ChainQuery(keyspace=KEYSPACE, chunk_hashes=hashes, shards=1)

        async def found() -> ChainMatch | None:
            try:
                await index.open_keyspace("test", SPEC)
                match = await index.match(query)
            except KvPoolError:
                return None
            tiers = {one.tier for run in match.runs for one in run.locations}
            return match if match.matched_chunks == 3 and tiers == {Tier.STAGING, Tier.DISK} else None

        match = await eventually(found)
        assert match is not None
        locations = [one for run in match.runs for one in run.locations]
        (incarnation,) = {one.incarnation for one in locations}
        assert incarnation > store.ready["incarnation"]
        # Clients that open a session now, or name what the index says, meet the new incarnation; old sessions go on.
        second = await store.open(expected_incarnation=incarnation)
        assert second.incarnation == incarnation
        await write(session, range(3, 4))
        for one in (session, second):
            await one.close()
        await control.close()
        await index.close()

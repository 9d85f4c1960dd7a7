"""Route over gRPC, from announcements to candidates."""

import pytest

from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import InvalidRequest, KeyspaceUnknown
from tests.fixtures.index_node import DISK, Chain, FakeNode, of_rank, open_keyspace
from tests.fixtures.index_server import running_index
from tests.fixtures.patience import patient


async def test_hosts_come_best_first() -> None:
    async with running_index() as index:
        chain = Chain(await open_keyspace(index.stub))
        near = await FakeNode(index.stub, b"n" * 16, host_id="near").register()
        far = await FakeNode(index.stub, b"f" * 16, host_id="far").register()
        await FakeNode(index.stub, b"e" * 16, host_id="empty").register()
        await near.announce(chain.added(range(30)))
        await far.announce([*chain.added(range(20), shards=of_rank(2, 0)), *chain.added(range(40), tier=DISK)])
        client = IndexClient(patient(index_endpoints=(index.endpoint,)))
        hashes = b"".join(chain.hashes)
        query = ChainQuery(keyspace=chain.keyspace, chunk_hashes=hashes, host_id="empty")
        answer = await client.route(query, with_unmatched=True)
        assert answer.matched_chunks == 40
        assert [(each.host_id, each.matched_chunks) for each in answer.candidates] == [
            ("near", 30),
            ("far", 40),
            ("empty", 0),
        ]
        assert [round(each.score, 6) for each in answer.candidates] == [27.0, 23.0, 12.0]
        (node,) = answer.candidates[1].nodes
        assert (node.node.node_id, node.gpu_chunks, node.staging_chunks, node.disk_chunks) == (far.node_id, 0, 20, 40)
        assert [each.host_id for each in (await client.route(query, count=1)).candidates] == ["near"]
        assert len((await client.route(query)).candidates) == 2
        with pytest.raises(InvalidRequest):
            await client.route(query, count=-1)
        with pytest.raises(KeyspaceUnknown):
            await client.route(ChainQuery(keyspace=bytes(16), chunk_hashes=hashes))
        await client.close()

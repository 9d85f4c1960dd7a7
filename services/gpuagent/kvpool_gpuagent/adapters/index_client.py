"""The index by way of the client library."""

from __future__ import annotations

from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.ports import OpenedKeyspace
from kvpool_server.node.replica_feed import LocationReplica


class GrpcIndex:
    """See ports.IndexPort. Matches are answered by a replica as far as it knows; the rest rides on an open stream."""

    def __init__(self, client: IndexClient, timeout_s: float, replica: LocationReplica | None = None) -> None:
        """Owns the replica."""
        self._client, self._timeout_s, self._replica = client, timeout_s, replica

    async def open_keyspace(self, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
        """See ports.IndexPort."""
        opened = await self._client.open_keyspace(name, spec, timeout_s=self._timeout_s)
        if self._replica is not None:
            self._replica.open_keyspace(opened.keyspace, opened.grid)
        return OpenedKeyspace(keyspace=opened.keyspace, hash_key=opened.hash_key)

    async def match(self, query: ChainQuery) -> ChainMatch:
        """See ports.IndexPort."""
        matches = self._replica or self._client.match_stream
        return await matches.match(query, timeout_s=self._timeout_s)

    def forget(self, query: ChainQuery) -> None:
        """See ports.IndexPort."""
        if self._replica is not None:
            self._replica.forget(query)

    async def close(self) -> None:
        """End the replica."""
        if self._replica is not None:
            await self._replica.close()

"""The index by way of the client library."""

from __future__ import annotations

from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.ports import OpenedKeyspace


class GrpcIndex:
    """See ports.IndexPort. Matches ride on the client's open stream."""

    def __init__(self, client: IndexClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    async def open_keyspace(self, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
        """See ports.IndexPort."""
        opened = await self._client.open_keyspace(name, spec, timeout_s=self._timeout_s)
        return OpenedKeyspace(keyspace=opened.keyspace, hash_key=opened.hash_key)

    async def match(self, query: ChainQuery) -> ChainMatch:
        """See ports.IndexPort."""
        return await self._client.match_stream.match(query, timeout_s=self._timeout_s)

"""Who else there is and who holds what, asked of the index."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.core.cluster import ChainMatch, ChainQuery, LiveNode, Location, NodeInfo, NodeKind
from kvpool.core.errors import KeyspaceUnknown
from kvpool.core.outcome import Tier
from kvpool_pagestore.adapters.index_link import NodeIndexLink
from kvpool_pagestore.core.copies import HeldChunk, Holder


class IndexPlacement:
    """A ports_movement.Placement over the node's link to the index."""

    def __init__(self, link: NodeIndexLink) -> None:
        self._link = link

    def me(self) -> NodeInfo | None:
        return self._link.registered

    async def nodes(self) -> Sequence[LiveNode]:
        return await self._link.client.list_nodes(NodeKind.PAGESTORE)

    async def holders(self, chunks: Sequence[HeldChunk]) -> list[list[Holder]]:
        """A chunk that the index does not know ends a match, and the rest is asked for anew."""
        found: list[list[Holder]] = []
        while len(found) < len(chunks):
            rest = chunks[len(found) :]
            match = await self._match(rest)
            for run in match.runs:
                found += [_holders(run.locations, match)] * run.chunk_count
            if match.matched_chunks < len(rest):
                found.append([])
        return found

    async def set_draining(self, draining: bool) -> None:
        await self._link.set_draining(draining)

    async def leave(self) -> None:
        await self._link.leave()

    async def _match(self, chunks: Sequence[HeldChunk]) -> ChainMatch:
        first = chunks[0]
        query = ChainQuery(
            keyspace=first.keyspace,
            chunk_hashes=b"".join(chunk.chunk_hash for chunk in chunks),
            first_chunk_index=first.chunk_index,
            group_head_hash=first.group_head_hash,
            shards=first.shards,
        )
        try:
            return await self._link.client.match_stream.match(query, timeout_s=self._link.timeout_s)
        except KeyspaceUnknown:  # nobody has opened it since the index lost what it knew
            return ChainMatch(matched_chunks=0)


def _holders(locations: Sequence[Location], match: ChainMatch) -> list[Holder]:
    disk: dict[bytes, int] = {}
    staging: dict[bytes, int] = {}
    for one in locations:
        if one.tier in (Tier.DISK, Tier.STAGING):
            shards = disk if one.tier is Tier.DISK else staging
            shards[one.node_id] = shards.get(one.node_id, 0) | one.shards
    return [
        Holder(node=match.nodes[node_id], disk_shards=disk.get(node_id, 0), staging_shards=staging.get(node_id, 0))
        for node_id in dict.fromkeys((*disk, *staging))
        if node_id in match.nodes
    ]

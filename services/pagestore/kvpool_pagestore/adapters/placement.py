"""Who else there is and who holds what, asked of the index."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.core.cluster import ChainMatch, ChainQuery, LiveNode, Location, NodeInfo, NodeKind
from kvpool.core.errors import KeyspaceUnknown, KvPoolError
from kvpool.core.outcome import Tier
from kvpool_pagestore.adapters.index_link import NodeIndexLink
from kvpool_pagestore.core.replication import HeldChunk, Holder


class IndexPlacement:
    """A ports.Placement over the node's link to the index."""

    def __init__(self, link: NodeIndexLink) -> None:
        self._link = link

    def me(self) -> NodeInfo | None:
        return self._link.registered

    async def nodes(self) -> Sequence[LiveNode]:
        return await self._link.client.list_nodes(NodeKind.PAGESTORE)

    async def holders(self, runs: Sequence[Sequence[HeldChunk]]) -> list[list[Holder]]:
        """A chunk that the index does not know ends a match; what follows it is asked for with the next questions."""
        found: list[list[list[Holder]]] = [[] for _ in runs]
        stream = self._link.client.match_stream
        while asked := [at for at, run in enumerate(runs) if len(found[at]) < len(run)]:
            queries = [_query(runs[at][len(found[at]) :]) for at in asked]
            answers = await stream.match_many(queries, timeout_s=self._link.timeout_s)
            for at, answer in zip(asked, answers, strict=True):
                if isinstance(answer, KeyspaceUnknown):  # no client has opened it since the index lost what it knew
                    found[at] += [[]] * (len(runs[at]) - len(found[at]))
                    continue
                if isinstance(answer, KvPoolError):
                    raise answer
                for run in answer.runs:
                    found[at] += [_holders(run.locations, answer)] * run.chunk_count
                if len(found[at]) < len(runs[at]):
                    found[at].append([])
        return [holders for one in found for holders in one]

    async def set_draining(self, draining: bool) -> None:
        await self._link.set_draining(draining)

    async def leave(self) -> None:
        await self._link.leave()


def _query(chunks: Sequence[HeldChunk]) -> ChainQuery:
    first = chunks[0]
    return ChainQuery(
        keyspace=first.keyspace,
        chunk_hashes=b"".join(chunk.chunk_hash for chunk in chunks),
        first_chunk_index=first.chunk_index,
        group_head_hash=first.group_head_hash,
        shards=first.shards,
    )


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

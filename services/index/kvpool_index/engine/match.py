"""Matches, and routes made of them."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from kvpool.core.cluster import ChainMatch, ChainQuery, RouteAnswer
from kvpool.core.coverage import Coverage
from kvpool.core.errors import InvalidRequest, Overloaded, StoreUnavailable
from kvpool.core.tracing import NO_TRACER, SpanKind, Tracer
from kvpool_index.config import IndexConfig
from kvpool_index.core.entries import (
    check_query,
)
from kvpool_index.core.match import MatchCache, Matcher
from kvpool_index.core.route import RouteWeights, route
from kvpool_index.engine.dead_locations import DeadLocations
from kvpool_index.engine.keyspaces import KeyspaceService
from kvpool_index.engine.nodes import NodeService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import IndexStore

_CANDIDATES_MAX: Final = 4096

_TIER_NAMES: Final = {1: "gpu", 2: "staging", 3: "disk"}


class MatchService:
    """Answers matches from the store and the table of nodes."""

    def __init__(
        self,
        store: IndexStore,
        nodes: NodeService,
        keyspaces: KeyspaceService,
        dead: DeadLocations,
        metrics: IndexMetrics,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._store, self._redis = store.locations, store.redis
        self._tracer, self._read_attributes = tracer, {"db.system.name": store.kind, "db.operation.name": "read_chain"}
        self._nodes = nodes
        self._keyspaces = keyspaces
        self._metrics = metrics
        self._known = MatchCache()
        self._dead = dead

    async def match(self, tenant: str, query: ChainQuery) -> ChainMatch:
        """The longest covered prefix. Raises InvalidRequest, KeyspaceUnknown, StoreUnavailable."""
        (found,) = await self.match_several(tenant, (query,))
        return found

    async def match_several(self, tenant: str, queries: Sequence[ChainQuery]) -> list[ChainMatch]:
        """The same for several chains, in one round of the store.

        All are of the keyspace, and for the shards and the host, that the first one names.
        """
        started_at_s = time.perf_counter()
        first = queries[0]
        keyspace = await self._keyspaces.get(tenant, first.keyspace)
        coverage = Coverage.of(keyspace.grid, first.shards)
        for query in queries:
            check_query(query)
        asked_at_s = time.perf_counter()
        with self._tracer.part("index.store.read", kind=SpanKind.CLIENT, attributes=self._read_attributes):
            values = await self._read(queries)
        read_at_s = time.perf_counter()
        matcher = self._judge(first, coverage)
        found = [matcher.match(each) for each in values]
        if not all(map(self._nodes.table.knows_ordinal, matcher.dead_ordinals)):
            # Either gone for good, or registered elsewhere a moment ago.
            with suppress(StoreUnavailable, Overloaded):  # the nodes' own master may be the one that is lost
                await self._nodes.learn(matcher.dead_ordinals)
            matcher = self._judge(first, coverage)
            found = [matcher.match(each) for each in values]
            for query, each in zip(queries, values, strict=True):
                self._dead.note(query, each, matcher.dead_ordinals)
        if self._redis is not None and matcher.malformed_count:
            self._redis.malformed["location"] += matcher.malformed_count
        self._metrics.store_duration_read.observe(read_at_s - asked_at_s)
        self._count(queries, found)
        self._metrics.match_duration.observe(time.perf_counter() - started_at_s)
        return found

    async def _read(self, queries: Sequence[ChainQuery]) -> list[list[bytes | None]]:
        if len(queries) > 1:
            return await self._store.read_chains(queries)
        return [await self._store.read_chain(queries[0]) if queries[0].chunk_hashes else []]

    def _judge(self, query: ChainQuery, coverage: Coverage) -> Matcher:
        return Matcher(coverage, host_id=query.host_id, live_node=self._nodes.live_node_now(), known=self._known)

    def _count(self, queries: Sequence[ChainQuery], found: Sequence[ChainMatch]) -> None:
        self._metrics.match_questions.inc(len(queries))
        self._metrics.chunks_asked.inc(sum(query.chunk_count for query in queries))
        matched: Counter[int] = Counter()
        for match in found:
            for run in match.runs:
                matched[run.locations[0].tier] += run.chunk_count
        for tier, chunk_count in matched.items():
            self._metrics.matched_by_tier[_TIER_NAMES[tier]].inc(chunk_count)


class RouteService:
    """Ranks hosts for routers."""

    def __init__(
        self, matches: MatchService, nodes: NodeService, keyspaces: KeyspaceService, config: IndexConfig
    ) -> None:
        self._matches, self._nodes, self._keyspaces = matches, nodes, keyspaces
        self._weights = RouteWeights(
            gpu=config.route_weight_gpu,
            staging=config.route_weight_staging,
            disk=config.route_weight_disk,
            remote=config.route_weight_remote,
        )

    async def route(self, tenant: str, query: ChainQuery, *, with_unmatched: bool, count: int) -> RouteAnswer:
        """Hosts, best first; count 0: all. Raises InvalidRequest, KeyspaceUnknown."""
        if not 0 <= count <= _CANDIDATES_MAX:
            raise InvalidRequest(f"count must be 0 to {_CANDIDATES_MAX}, got {count}")
        found = await self._matches.match(tenant, replace(query, host_id=""))
        keyspace = await self._keyspaces.get(tenant, query.keyspace)
        candidates = route(
            found,
            self._nodes.live_nodes_now(),
            coverage=Coverage.of(keyspace.grid, query.shards),
            weights=self._weights,
            with_unmatched=with_unmatched,
        )
        return RouteAnswer(matched_chunks=found.matched_chunks, candidates=tuple(candidates[: count or None]))

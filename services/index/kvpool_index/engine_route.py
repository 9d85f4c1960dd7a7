"""Routes: a match, seen from every host."""

from dataclasses import replace
from typing import Final

from kvpool.core.cluster import ChainQuery, RouteAnswer
from kvpool.core.coverage import Coverage
from kvpool.core.errors import InvalidRequest
from kvpool_index.config import IndexConfig
from kvpool_index.core.route import RouteWeights, route
from kvpool_index.engine_keyspaces import KeyspaceService
from kvpool_index.engine_match import MatchService
from kvpool_index.engine_nodes import NodeService

_CANDIDATES_MAX: Final = 4096


class RouteService:
    """Answers routers."""

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

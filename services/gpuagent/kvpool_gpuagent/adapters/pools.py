"""Which page pool an agent's sessions get."""

from __future__ import annotations

from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.pagestore import SessionPlan
from kvpool.client.segments import MapHook
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.adapters.arena_pool import ArenaPool
from kvpool_gpuagent.adapters.bounce import PeerClients
from kvpool_gpuagent.adapters.stream_pool import StreamBuffers, StreamPool
from kvpool_gpuagent.ports import PagePool


class ConfiguredPools:
    """See ports.PoolFactory: the arena of the local pagestore if there is one, else streams through bounce buffers."""

    def __init__(
        self,
        index: IndexClient,
        config: ClientConfig,
        *,
        pagestore_socket: str,
        bounce_bytes: int,
        on_map: MapHook | None = None,
    ) -> None:
        """on_map: makes arena segments fast for the device that copies from and to them."""
        self._index, self._config, self._pagestore_socket = index, config, pagestore_socket
        self._buffers = StreamBuffers.of(bounce_bytes)
        self._peers = PeerClients(config.tls)
        self._on_map = on_map

    def __call__(self, keyspace: bytes, spec: KeyspaceSpec, peer_name: str) -> PagePool:
        """A pool for one engine session."""
        if self._pagestore_socket:
            plan = SessionPlan(
                endpoint=f"unix:{self._pagestore_socket}", peer_name=peer_name, keyspaces=((keyspace, spec),)
            )
            return ArenaPool(plan, self._config, on_map=self._on_map)
        return StreamPool(keyspace, spec, self._index, self._buffers, self._peers, self._config.host_id)

    def close(self) -> None:
        """End connections; blocks until their threads have ended."""
        self._peers.close()

"""Which page pool an agent's sessions get."""

from __future__ import annotations

from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.adapters.arena_pool import ArenaLink, ArenaPool
from kvpool_gpuagent.adapters.bounce import PeerClients
from kvpool_gpuagent.adapters.stream_pool import StreamBuffers, StreamPool
from kvpool_gpuagent.ports import PagePool


class ConfiguredPools:
    """See ports.PoolFactory: the arena of the local pagestore if there is one, else streams through bounce buffers."""

    def __init__(self, index: IndexClient, config: ClientConfig, *, arena: ArenaLink | None, bounce_bytes: int) -> None:
        """arena: the link to this host's pagestore; None: there is none."""
        self._index, self._config, self._arena = index, config, arena
        self._buffers = StreamBuffers.of(bounce_bytes)
        self._peers = PeerClients(config.tls, config.tracer)

    def __call__(self, keyspace: bytes, spec: KeyspaceSpec) -> PagePool:
        """A pool for one engine session."""
        if self._arena is not None:
            return ArenaPool(self._arena, keyspace, spec)
        return StreamPool(keyspace, spec, self._index, self._buffers, self._peers, self._config.host_id)

    def close(self) -> None:
        """End connections; blocks until their threads have ended."""
        self._peers.close()

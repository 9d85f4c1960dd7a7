"""The index and other agents of this host, by way of the client library."""

from __future__ import annotations

import asyncio
import os
import stat

from kvpool.client.cache_loan import CacheLoan
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.core.addresses import check_socket_path
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import InvalidRequest, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.ports import MappedHandle, OpenedKeyspace
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


class LentCache:
    """See ports.CacheLoan."""

    def __init__(self, loan: CacheLoan) -> None:
        self._loan = loan
        self.layout = loan.layout
        self.handles = tuple(MappedHandle(size_bytes=each.size_bytes, ipc=each.memory) for each in loan.regions)

    @property
    def ended(self) -> asyncio.Event:
        """See ports.CacheLoan."""
        return self._loan.ended

    async def check(self, timeout_s: float) -> None:
        """See ports.CacheLoan."""
        await self._loan.check(timeout_s)

    async def close(self) -> None:
        """See ports.CacheLoan."""
        await self._loan.close()


class GrpcPeerAgents:
    """See ports.PeerAgents. Each loan has a connection of its own, so that its end is the end of the other side."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config

    async def lease(self, endpoint: str, session_id: bytes, keyspace: bytes, timeout_s: float) -> LentCache:
        """See ports.PeerAgents. Raises InvalidRequest for a path that is not a socket of an agent like this one."""
        await asyncio.to_thread(_check_socket, endpoint.removeprefix("unix:"))
        return LentCache(await CacheLoan.open(endpoint, session_id, keyspace, self._config, timeout_s=timeout_s))


def _check_socket(path: str) -> None:
    """A peer names the path: this process must not be led to the sockets of others, such as a container runtime's."""
    check_socket_path(path, "source_agent")
    try:
        is_own = os.path.realpath(path) == path and _is_own_socket(os.lstat(path))
    except FileNotFoundError:  # its agent may be starting again
        raise ServiceUnavailable(f"failed to connect to source_agent {path!r}: it does not exist") from None
    except OSError as error:
        raise InvalidRequest(f"source_agent {path!r} cannot be used: {error.strerror}") from None
    if not is_own:
        raise InvalidRequest(
            f"source_agent must be the path of a socket of uid {os.geteuid()}, without symbolic links and '..', "
            f"got {path!r}"
        )


def _is_own_socket(found: os.stat_result) -> bool:
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()

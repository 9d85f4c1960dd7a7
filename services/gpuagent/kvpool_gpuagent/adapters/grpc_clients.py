"""The index and other agents of this host, by way of the client library."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Callable, Collection

from kvpool.client.cache_loan import CacheLoan
from kvpool.client.config import ClientConfig
from kvpool.client.gpuagent_control import AgentControl
from kvpool.client.index import IndexClient
from kvpool.client.retry import Backoff
from kvpool.core.addresses import check_socket_path
from kvpool.core.cluster import ChainMatch, ChainQuery
from kvpool.core.errors import InvalidRequest, KvPoolError, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec
from kvpool_gpuagent.core.cached_chunks import FoundChunks, HeldChunks, SourceName
from kvpool_gpuagent.ports import BlockIds, MappedHandle, OpenedKeyspace
from kvpool_server.node.replica_feed import LocationReplica

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0  # for agents that have come or gone
_SILENT_S, _SILENT_MAX_S = 0.5, 30.0  # after an agent has not answered


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

    def note_stored(self, query: ChainQuery) -> None:
        """See ports.IndexPort."""
        if self._replica is not None:
            self._replica.note_stored(query)

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

    async def check(self, block_ids: BlockIds, timeout_s: float) -> BlockIds:
        """See ports.CacheLoan."""
        return await self._loan.check(block_ids.reshape(-1), timeout_s)

    async def close(self) -> None:
        """See ports.CacheLoan."""
        await self._loan.close()


class _Neighbour:
    """Another agent of this host, asked what its engines' caches hold. silent_until_s: not asked before."""

    def __init__(self, path: str, control: AgentControl) -> None:
        self.silent_until_s = 0.0
        self._path, self._control, self._backoff = path, control, Backoff(_SILENT_S, _SILENT_MAX_S)
        self._finds: set[asyncio.Task[list[HeldChunks]]] = set()

    def find(
        self, keyspace: bytes, chunk_hashes: bytes, engine_id: bytes, timeout_s: float
    ) -> asyncio.Task[list[HeldChunks]]:
        """Begin to ask. The task never raises."""
        task = asyncio.ensure_future(self._find(keyspace, chunk_hashes, engine_id, timeout_s))
        self._finds.add(task)
        task.add_done_callback(self._finds.discard)
        return task

    async def close(self) -> None:
        """Close the connection once all that was asked has ended."""
        if self._finds:
            await asyncio.wait(self._finds)
        await self._control.close()

    async def _find(self, keyspace: bytes, chunk_hashes: bytes, engine_id: bytes, timeout_s: float) -> list[HeldChunks]:
        try:
            caches = await self._control.find_cached_chunks(keyspace, chunk_hashes, engine_id, timeout_s=timeout_s)
        except KvPoolError as error:
            self.silent_until_s = asyncio.get_running_loop().time() + self._backoff.next_s()
            _log.info("agent %s is not asked for a moment what its engines' caches hold: %s", self._path, error)
            return []
        self._backoff.reset()
        return [
            HeldChunks(
                source=SourceName(each.session_id, f"unix:{self._path}"),
                layers=each.layers,
                heads=each.heads,
                scales=each.scales,
                found=FoundChunks(each.positions, each.block_ids, each.generations),
            )
            for each in caches
        ]


class GrpcPeerAgents:
    """See ports.PeerAgents. Each loan has a connection of its own, so that its end is the end of the other side."""

    def __init__(self, config: ClientConfig, agents_beside: Callable[[], Collection[str]] = tuple) -> None:
        """agents_beside: sockets of other agents of this host whose engines' caches are on GPUs, now; may block."""
        self._config, self._agents_beside = config, agents_beside
        self._neighbours: dict[str, _Neighbour] = {}  # by socket
        self._leaving: set[asyncio.Task[None]] = set()  # closes of those that have gone
        self._looking: asyncio.Future[None] | None = None
        self._looked, self._looked_at_s = False, 0.0

    async def find(self, keyspace: bytes, chunk_hashes: bytes, engine_id: bytes, timeout_s: float) -> list[HeldChunks]:
        """See ports.PeerAgents."""
        now_s = asyncio.get_running_loop().time()
        if self._looking is None or (self._looking.done() and now_s - self._looked_at_s >= _LOOK_EVERY_S):
            self._looked_at_s = now_s
            self._looking = asyncio.ensure_future(self._look())
        if not self._looked:  # later ones run beside the calls
            await asyncio.wait((self._looking,), timeout=timeout_s)
        asked = [one for one in self._neighbours.values() if now_s >= one.silent_until_s]
        found = await asyncio.gather(*(one.find(keyspace, chunk_hashes, engine_id, timeout_s) for one in asked))
        return [held for each in found for held in each]

    async def close(self) -> None:
        """See ports.PeerAgents."""
        if self._looking is not None:
            await asyncio.gather(self._looking, return_exceptions=True)
        neighbours, self._neighbours = self._neighbours, {}
        await asyncio.gather(*self._leaving, *(one.close() for one in neighbours.values()))

    def _own_agents_beside(self) -> set[str]:
        """Return the sockets that are an agent's of this user."""
        there = set[str]()
        for path in self._agents_beside():
            with contextlib.suppress(InvalidRequest, ServiceUnavailable):
                _check_socket(path)
                there.add(path)
        return there

    async def _look(self) -> None:
        """Open connections to agents that have come, and close those to agents that have gone. Never raises."""
        try:
            there = await asyncio.to_thread(self._own_agents_beside)
        except OSError as error:
            _log.warning("agents of this host cannot be found: %s", error)
            return
        finally:
            self._looked = True
        gone = [path for path in self._neighbours if path not in there]
        for path in there:
            if path not in self._neighbours:
                self._neighbours[path] = _Neighbour(path, AgentControl(f"unix:{path}", self._config))
        for path in gone:
            leaving = asyncio.ensure_future(self._neighbours.pop(path).close())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

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

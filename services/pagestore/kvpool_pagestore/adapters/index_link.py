"""The index, by way of the client library's node link; or no index at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.retry import Backoff
from kvpool.client.tls import TlsCredentials
from kvpool.core.cluster import (
    ChainMatch,
    ChainQuery,
    LiveNode,
    Location,
    LocationChange,
    NodeInfo,
    NodeKind,
    NodeLoad,
    RemoteSource,
)
from kvpool.core.errors import (
    DeadlineExceeded,
    KeyspaceUnknown,
    KvPoolError,
    StaleIncarnation,
    StoreFault,
    StoreUnavailable,
)
from kvpool.core.keyspace import keyspace_id
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.core.policy import VersionedPolicy
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_pagestore.core.replication import HeldChunk, Holder
from kvpool_server.node.chunk_directory import LocationTruth
from kvpool_server.node.node_link import NodeLink, NodeLinkConfig
from kvpool_server.node.reconciler import Reconciler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registrant:
    """What registers: the node, and what the link asks of its owner. See kvpool_server.node.node_link.NodeLink."""

    node: NodeInfo
    last_incarnation: int
    load: Callable[[], NodeLoad]
    truth: LocationTruth
    on_superseded: Callable[[BaseException], None]
    on_policy_version: Callable[[int], None]
    adopt: Callable[
        [int], Awaitable[None]
    ]  # serve under a granted incarnation; raises StoreFault if it cannot be made durable


class NodeIndexLink:
    """Implements ports.IndexLink and ports.Placement.

    What is announced before the node is registered waits in the link's bounded queue.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        timeout_s: float,
        reconcile_interval_s: float,
        *,
        tls: TlsCredentials | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._timeout_s = timeout_s
        self._config = NodeLinkConfig(reconcile_interval_s=reconcile_interval_s)
        self._client = IndexClient(
            ClientConfig(index_endpoints=endpoints, call_timeout_s=timeout_s, tls=tls, tracer=tracer)
        )
        self._link: NodeLink | None = None
        self._registering: asyncio.Task[None] | None = None
        self._registrant: Registrant | None = None
        self._node: NodeInfo | None = None

    def me(self) -> NodeInfo | None:
        if self._link is None or self._node is None or not self._link.incarnation:
            return None
        return replace(self._node, incarnation=self._link.incarnation)

    async def nodes(self) -> Sequence[LiveNode]:
        return await self._client.list_nodes(NodeKind.PAGESTORE)

    async def holders(self, runs: Sequence[Sequence[HeldChunk]]) -> list[list[Holder]]:
        """A chunk that the index does not know ends a match; what follows it is asked for with the next questions."""
        found: list[list[list[Holder]]] = [[] for _ in runs]
        stream = self._client.match_stream
        while asked := [at for at, run in enumerate(runs) if len(found[at]) < len(run)]:
            queries = [_query(runs[at][len(found[at]) :]) for at in asked]
            answers = await stream.match_many(queries, timeout_s=self._timeout_s)
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
        link, node = self._registered(), self._node
        if node is None or node.draining is draining:
            return
        changed = replace(node, draining=draining)
        try:
            async with asyncio.timeout(self._timeout_s):
                await link.update(changed)
        except TimeoutError:
            raise StoreUnavailable(f"the index did not register this node within {self._timeout_s:g} s") from None
        self._node = changed

    async def leave(self) -> None:
        if self._link is not None:
            await self._link.close()

    async def register(self, registrant: Registrant, wait_s: float) -> int:
        """The granted and adopted incarnation, or 0 if the index did not answer in time: it is asked further then.

        Raises what the index answers, InvalidRequest for example; StoreFault.
        """
        self._node, self._registrant = registrant.node, registrant
        link = self._link = NodeLink(
            self._client,
            registrant.node,
            last_incarnation=registrant.last_incarnation,
            load=registrant.load,
            truth=registrant.truth,
            on_superseded=registrant.on_superseded,
            config=self._config,
            on_policy_version=registrant.on_policy_version,
        )
        try:
            return (await link.start(wait_s, adopt=registrant.adopt)).incarnation
        except DeadlineExceeded as error:
            _log.warning("serving without the index for now: %s", error)
        self._registering = asyncio.get_running_loop().create_task(self._register_late(link, registrant))
        return 0

    def announce(self, changes: Sequence[LocationChange]) -> None:
        if self._link is not None:
            self._link.announce(changes)

    def reconciler(self) -> Reconciler | None:
        """What compares this node with the index; None before `register`. Its figures may be read from any thread."""
        return self._link.reconciler if self._link is not None else None

    async def wait_announced(self) -> None:
        await self._registered().wait_announced(self._timeout_s)

    async def drop_keyspace(self, keyspace: bytes) -> None:
        try:
            await self._registered().drop_keyspace(keyspace)
        except KvPoolError as error:
            # Stale entries cost one miss each, and are corrected then.
            _log.warning("the index still names pages of a cleared keyspace: %s", error)

    def report_stale(self, key: PageKey, group_head_hash: bytes, source: RemoteSource) -> None:
        if self._link is not None:
            self._link.report_stale(key, group_head_hash, source)

    async def fetch_policies(
        self, keyspaces: Sequence[bytes], known: Sequence[VersionedPolicy]
    ) -> Sequence[VersionedPolicy]:
        found = await self._client.get_keyspace_policies(keyspaces, timeout_s=self._timeout_s)
        versions = {one.keyspace: one.version for one in found}
        lost = {one.keyspace: one for one in known if versions.get(one.keyspace, 0) < one.version}
        if not lost or self._registrant is None:
            return found
        encodings = ((keyspace_id(each), each) for each in self._registrant.truth.keyspace_encodings())
        restored = [(encoding, lost[at]) for at, encoding in encodings if at in lost]
        if not restored:
            return found
        node_id, incarnation = self._registrant.node.node_id, self._registered().incarnation
        await self._client.restore_keyspace_policies(node_id, incarnation, restored, timeout_s=self._timeout_s)
        return await self._client.get_keyspace_policies(keyspaces, timeout_s=self._timeout_s)

    async def close(self) -> None:
        """End the lease: the node's locations leave every match."""
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait([self._registering])
        if self._link is not None:
            await self._link.close()
        await self._client.close()

    def _registered(self) -> NodeLink:
        if self._link is None or not self._link.incarnation:
            raise StoreUnavailable("this node is not registered with the index")
        return self._link

    async def _register_late(self, link: NodeLink, registrant: Registrant) -> None:
        config = self._client.endpoints.config
        backoff = Backoff(config.backoff_initial_s, config.backoff_max_s)
        while True:
            try:
                await link.start(None, adopt=registrant.adopt)
                return
            except StoreFault as error:
                _log.error("the granted incarnation was not made durable; registering again: %s", error)
            except StaleIncarnation as error:
                registrant.on_superseded(error)
                return
            except KvPoolError as error:  # what the operator may mend at the index, or a fault of one replica
                _log.error("the index refuses this node, which stays unknown to others; asking again: %s", error)
            await asyncio.sleep(backoff.next_s())


class NoIndex:
    """Implements ports.IndexLink for a node that stands alone."""

    def announce(self, changes: Sequence[LocationChange]) -> None:
        pass

    async def wait_announced(self) -> None:
        pass

    async def drop_keyspace(self, keyspace: bytes) -> None:
        pass

    def report_stale(self, key: PageKey, group_head_hash: bytes, source: RemoteSource) -> None:
        pass

    async def fetch_policies(
        self, keyspaces: Sequence[bytes], known: Sequence[VersionedPolicy]
    ) -> Sequence[VersionedPolicy]:
        return ()

    async def close(self) -> None:
        pass


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

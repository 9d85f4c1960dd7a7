"""Control calls of a pagestore: status, and what operators want done with pages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvpool.client.channel import streamed
from kvpool.client.config import ClientConfig
from kvpool.client.endpoints import Endpoints
from kvpool.core.cluster import PageMetadata
from kvpool.core.page import PageKey
from kvpool.v1 import pagestore_pb2
from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceStub
from kvpool.wire.convert import check_id
from kvpool.wire.convert_pages import page_metadata_from_proto

if TYPE_CHECKING:
    from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceAsyncStub


_DISK_STATES = {
    pagestore_pb2.DISK_STATE_READ_WRITE: "read_write",
    pagestore_pb2.DISK_STATE_READ_ONLY: "read_only",
    pagestore_pb2.DISK_STATE_OFF: "off",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStoreStatus:
    """Budgets and use of one pagestore; see the proto message GetPageStoreStatusResponse."""

    node_id: bytes
    incarnation: int
    arena_capacity_bytes: int
    arena_segment_bytes: int
    arena_used_bytes: int
    arena_quarantined_bytes: int
    staging_page_count: int
    dirty_page_count: int
    disk_capacity_bytes: int
    disk_used_bytes: int
    disk_page_count: int
    session_count: int
    lease_count: int
    disk_fault: str  # empty if the disk tier works
    disk_state: str = ""  # read_write, read_only or off; empty: there is no disk tier
    draining: bool = False
    replica_queue_chunks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """How far a drain is; see the proto message DrainResponse."""

    moved_page_count: int
    moved_bytes: int
    kept_page_count: int
    remaining_chunk_count: int
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictOutcome:
    """Pages given up, and those that stayed: pinned, or (staging only) without a copy on the node's disk."""

    page_count: int
    pinned_count: int
    undurable_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictPreview:
    """What an eviction would do; see the proto message PreviewEvictResponse."""

    outcome: EvictOutcome
    chunk_count: int
    staging_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedChunk:
    """What one pagestore holds of a chunk; see the proto message of that name."""

    keyspace: bytes
    chunk_hash: bytes
    metadata: PageMetadata
    staging_shards: int
    disk_shards: int
    page_reads_per_minute: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOutcome:
    """What became of the pages that were dirty when the flush began."""

    page_count: int
    failed_count: int


def _async_stub(channel: grpc.aio.Channel) -> PageStoreServiceAsyncStub:
    return PageStoreServiceStub(channel)


class PageStoreControl:
    """Unary calls to one pagestore. Belongs to one event loop.

    raises, all of them: ServiceUnavailable, DeadlineExceeded, TenantDenied, Draining.
    """

    def __init__(self, endpoint: str, config: ClientConfig) -> None:
        self._endpoints: Endpoints[PageStoreServiceAsyncStub] = Endpoints((endpoint,), config, _async_stub)

    async def flush(self, keyspace: bytes = b"", *, timeout_s: float = 60.0) -> FlushOutcome:
        """Wait until all pages that are dirty now are durable; empty keyspace: all the tenant's. raises: StoreFault."""
        request = pagestore_pb2.FlushRequest(keyspace_id=keyspace)
        answer = await self._endpoints.call(lambda stub: stub.Flush, request, timeout_s=timeout_s)
        return FlushOutcome(page_count=answer.page_count, failed_count=answer.failed_count)

    async def clear(self, keyspace: bytes = b"", *, timeout_s: float = 60.0) -> int:
        """Drop pages; the number dropped. Empty keyspace: all the tenant's."""
        request = pagestore_pb2.ClearRequest(keyspace_id=keyspace)
        answer = await self._endpoints.call(lambda stub: stub.Clear, request, timeout_s=timeout_s)
        return answer.page_count

    async def status(self, *, timeout_s: float | None = None) -> PageStoreStatus:
        """Budgets, use, sessions."""
        request = pagestore_pb2.GetPageStoreStatusRequest()
        answer = await self._endpoints.call(lambda stub: stub.GetPageStoreStatus, request, timeout_s=timeout_s)
        return PageStoreStatus(
            node_id=answer.node_id,
            incarnation=answer.incarnation,
            arena_capacity_bytes=answer.arena_capacity_bytes,
            arena_segment_bytes=answer.arena_segment_bytes,
            arena_used_bytes=answer.arena_used_bytes,
            arena_quarantined_bytes=answer.arena_quarantined_bytes,
            staging_page_count=answer.staging_page_count,
            dirty_page_count=answer.dirty_page_count,
            disk_capacity_bytes=answer.disk_capacity_bytes,
            disk_used_bytes=answer.disk_used_bytes,
            disk_page_count=answer.disk_page_count,
            session_count=answer.session_count,
            lease_count=answer.lease_count,
            disk_fault=answer.disk_fault,
            disk_state=_DISK_STATES.get(answer.disk_state, ""),
            draining=answer.draining,
            replica_queue_chunks=answer.replica_queue_chunks,
        )

    async def pin(
        self, keyspace: bytes, chunk_hashes: Sequence[bytes], pinned_until_us: int, *, timeout_s: float | None = None
    ) -> int:
        """Pin chunks until a wall time, or (0) end their pins; how many pages of them the node has.

        raises: QuotaExceeded when more than the node's share of pinned bytes would be, StoreFault.
        """
        request = pagestore_pb2.PinRequest(
            keyspace_id=keyspace, chunk_hashes=chunk_hashes, pinned_until_us=pinned_until_us
        )
        answer = await self._endpoints.call(lambda stub: stub.Pin, request, timeout_s=timeout_s)
        return answer.page_count

    async def evict(
        self,
        keyspace: bytes,
        chunk_hashes: Sequence[bytes] | None,
        *,
        staging_only: bool = False,
        with_pinned: bool = False,
        timeout_s: float | None = None,
    ) -> EvictOutcome:
        """Give chunks up before their time; None: all of the keyspace. raises: StoreFault."""
        request = _evict_request(keyspace, chunk_hashes, staging_only=staging_only, with_pinned=with_pinned)
        answer = await self._endpoints.call(lambda stub: stub.Evict, request, timeout_s=timeout_s)
        return _outcome(answer)

    async def preview_evict(
        self,
        keyspace: bytes,
        chunk_hashes: Sequence[bytes] | None,
        *,
        staging_only: bool = False,
        with_pinned: bool = False,
        timeout_s: float | None = None,
    ) -> EvictPreview:
        """What `evict` would do now; nothing is changed. raises: NotServed, of a node of an earlier release."""
        request = _evict_request(keyspace, chunk_hashes, staging_only=staging_only, with_pinned=with_pinned)
        answer = await self._endpoints.call(lambda stub: stub.PreviewEvict, request, timeout_s=timeout_s)
        return EvictPreview(
            outcome=_outcome(answer),
            chunk_count=answer.chunk_count,
            staging_bytes=answer.staging_bytes,
            disk_bytes=answer.disk_bytes,
        )

    async def list_chunks(
        self, keyspace: bytes = b"", *, most_read: int = 0, pinned_only: bool = False, timeout_s: float | None = None
    ) -> AsyncGenerator[ListedChunk]:
        """Chunks that the node holds, or the `most_read` of them; empty keyspace: all the tenant's. Close it."""
        request = pagestore_pb2.ListChunksRequest(keyspace_id=keyspace, most_read=most_read, pinned_only=pinned_only)
        endpoints = self._endpoints
        with streamed(
            lambda: endpoints.stub().ListChunks(request, timeout=timeout_s, metadata=endpoints.config.metadata),
            endpoints.config.tls,
        ) as call:
            async for answer in call:
                for chunk in answer.chunks:
                    yield ListedChunk(
                        keyspace=check_id(chunk.keyspace_id, "keyspace_id"),
                        chunk_hash=check_id(chunk.chunk_hash, "chunk_hash"),
                        metadata=page_metadata_from_proto(chunk.metadata),
                        staging_shards=chunk.staging_shards,
                        disk_shards=chunk.disk_shards,
                        page_reads_per_minute=chunk.page_reads_per_minute,
                    )

    async def prefetch(self, keys: Sequence[PageKey], *, timeout_s: float | None = None) -> int:
        """Begin to bring pages from the node's disk to its staging tier; how many were begun."""
        request = pagestore_pb2.PrefetchRequest(keys=[key.pack() for key in keys])
        answer = await self._endpoints.call(lambda stub: stub.Prefetch, request, timeout_s=timeout_s)
        return answer.started_count

    async def drain(self, *, cancel: bool = False, timeout_s: float | None = None) -> AsyncGenerator[DrainProgress]:
        """Drain the node, or go on with it; its progress until it is done. Close the generator to stop moving.

        cancel: end a drain that has not ended instead. raises: DrainBlocked, StoreUnavailable, StoreFault.
        """
        request = pagestore_pb2.DrainRequest(cancel=cancel)
        endpoints = self._endpoints
        with streamed(
            lambda: endpoints.stub().Drain(request, timeout=timeout_s, metadata=endpoints.config.metadata),
            endpoints.config.tls,
        ) as call:
            async for answer in call:
                yield DrainProgress(
                    moved_page_count=answer.moved_page_count,
                    moved_bytes=answer.moved_bytes,
                    kept_page_count=answer.kept_page_count,
                    remaining_chunk_count=answer.remaining_chunk_count,
                    done=answer.done,
                )

    async def close(self) -> None:
        """Close the channel. Idempotent."""
        await self._endpoints.close()


def _evict_request(
    keyspace: bytes, chunk_hashes: Sequence[bytes] | None, *, staging_only: bool, with_pinned: bool
) -> pagestore_pb2.EvictRequest:
    return pagestore_pb2.EvictRequest(
        keyspace_id=keyspace,
        chunk_hashes=chunk_hashes or (),
        whole_keyspace=chunk_hashes is None,
        staging_only=staging_only,
        with_pinned=with_pinned,
    )


def _outcome(answer: pagestore_pb2.EvictResponse | pagestore_pb2.PreviewEvictResponse) -> EvictOutcome:
    return EvictOutcome(
        page_count=answer.page_count,
        pinned_count=answer.pinned_page_count,
        undurable_count=answer.undurable_page_count,
    )

"""Control calls of a pagestore: flush, clear, status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvpool.client.channel import Endpoints
from kvpool.client.config import ClientConfig
from kvpool.v1 import pagestore_pb2
from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceStub

if TYPE_CHECKING:
    from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceAsyncStub


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
        )

    async def close(self) -> None:
        """Close the channel. Idempotent."""
        await self._endpoints.close()

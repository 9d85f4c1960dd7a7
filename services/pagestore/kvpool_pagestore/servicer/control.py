"""The control service: sessions, status, and what operators want done with pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.v1 import pagestore_pb2_grpc as pb_grpc
from kvpool.wire.convert import check_count, check_id, check_optional_id, convert_items
from kvpool.wire.convert_pages import page_key_from_proto, page_metadata_to_proto
from kvpool_pagestore.engine.inventory import MAX_MOST_READ
from kvpool_pagestore.engine.retention import MAX_PIN_CHUNKS
from kvpool_pagestore.engine.store import PageStoreEngine
from kvpool_pagestore.servicer.messages import (
    chunk_hash_from_proto,
    evict_target_from_proto,
)
from kvpool_pagestore.servicer.session import PageStoreHandler, SessionLimits
from kvpool_server.session_stream import SessionStream, peer_address

_DISK_STATES = (pb.DISK_STATE_READ_WRITE, pb.DISK_STATE_READ_ONLY, pb.DISK_STATE_OFF)  # by DiskState
_PREFETCH_KEYS_MAX = 4096

_Context = grpc.aio.ServicerContext[Any, Any]


class PageStoreServicer(pb_grpc.PageStoreServiceServicer):
    """`tenant` returns the tenant of the current call."""

    def __init__(
        self, engine: PageStoreEngine, tenant: Callable[[], str], limits: SessionLimits, tracer: Tracer = NO_TRACER
    ) -> None:
        self._tracer = tracer
        self._engine = engine
        self._tenant = tenant
        self._limits = limits

    async def Session(  # type: ignore[override]  # a coroutine that writes: its end is known when it is over
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: _Context
    ) -> None:
        address = peer_address(context.peer())
        handler = PageStoreHandler(self._engine, self._limits, self._tenant(), address, self._tracer)
        await SessionStream(self._limits.rules(), handler).serve(request_iterator, context.write)

    async def Flush(self, request: pb.FlushRequest, context: _Context) -> pb.FlushResponse:
        keyspace = check_optional_id(request.keyspace_id, "keyspace_id")
        page_count, failed_count = await self._engine.flush(self._tenant(), keyspace)
        return pb.FlushResponse(page_count=page_count, failed_count=failed_count)

    async def Clear(self, request: pb.ClearRequest, context: _Context) -> pb.ClearResponse:
        keyspace = check_optional_id(request.keyspace_id, "keyspace_id")
        return pb.ClearResponse(page_count=await self._engine.clear(self._tenant(), keyspace))

    async def GetPageStoreStatus(
        self, request: pb.GetPageStoreStatusRequest, context: _Context
    ) -> pb.GetPageStoreStatusResponse:
        gauges = self._engine.gauges()
        return pb.GetPageStoreStatusResponse(
            node_id=self._limits.node_id,
            incarnation=self._engine.incarnation,
            arena_capacity_bytes=gauges.arena_capacity_bytes,
            arena_segment_bytes=gauges.arena_segment_bytes,
            arena_used_bytes=gauges.arena_used_bytes,
            arena_quarantined_bytes=gauges.arena_quarantined_bytes,
            staging_page_count=gauges.staging_pages,
            dirty_page_count=self._engine.dirty_page_count,
            disk_capacity_bytes=gauges.disk_capacity_bytes,
            disk_used_bytes=gauges.disk_used_bytes,
            disk_page_count=gauges.disk_pages,
            session_count=gauges.sessions,
            lease_count=gauges.leases,
            disk_fault=self._engine.disk_fault,
            disk_state=_DISK_STATES[gauges.disk_state] if gauges.disk_capacity_bytes else pb.DISK_STATE_UNSPECIFIED,
            draining=bool(gauges.draining),
            replica_queue_chunks=gauges.replica_queue_chunks,
        )

    async def Prefetch(self, request: pb.PrefetchRequest, context: _Context) -> pb.PrefetchResponse:
        keys = convert_items(request.keys, page_key_from_proto, "key", most=_PREFETCH_KEYS_MAX)
        return pb.PrefetchResponse(started_count=self._engine.prefetch.start(self._tenant(), keys))

    async def Pin(self, request: pb.PinRequest, context: _Context) -> pb.PinResponse:
        page_count = await self._engine.retention.pin(
            self._tenant(),
            check_id(request.keyspace_id, "keyspace_id"),
            convert_items(request.chunk_hashes, chunk_hash_from_proto, "chunk hash", most=MAX_PIN_CHUNKS),
            check_count(request.pinned_until_us, "pinned_until_us"),
        )
        return pb.PinResponse(page_count=page_count)

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> AsyncIterator[pb.DrainResponse]:
        drain = self._engine.drain
        if request.cancel:
            await drain.cancel()
            yield pb.DrainResponse(done=True)
            return
        async with aclosing(drain.watch()) as progresses:
            async for progress in progresses:
                yield pb.DrainResponse(
                    moved_page_count=progress.moved_pages,
                    remaining_chunk_count=progress.remaining,
                    moved_bytes=progress.moved_bytes,
                    kept_page_count=progress.kept_pages,
                    done=progress.done,
                )

    async def Evict(self, request: pb.EvictRequest, context: _Context) -> pb.EvictResponse:
        evicted = await self._engine.evicting.evict(self._tenant(), evict_target_from_proto(request))
        return pb.EvictResponse(
            page_count=evicted.page_count,
            pinned_page_count=evicted.pinned_count,
            undurable_page_count=evicted.undurable_count,
        )

    async def PreviewEvict(self, request: pb.EvictRequest, context: _Context) -> pb.PreviewEvictResponse:
        preview = await self._engine.evicting.preview(self._tenant(), evict_target_from_proto(request))
        return pb.PreviewEvictResponse(
            chunk_count=preview.chunk_count,
            page_count=preview.evicted.page_count,
            staging_bytes=preview.staging_bytes,
            disk_bytes=preview.disk_bytes,
            pinned_page_count=preview.evicted.pinned_count,
            undurable_page_count=preview.evicted.undurable_count,
        )

    async def ListChunks(
        self, request: pb.ListChunksRequest, context: _Context
    ) -> AsyncIterator[pb.ListChunksResponse]:
        keyspace = check_optional_id(request.keyspace_id, "keyspace_id")
        most_read = check_count(request.most_read, "most_read", most=MAX_MOST_READ)
        listed = self._engine.listing.chunks(
            self._tenant(), keyspace, most_read=most_read, pinned_only=request.pinned_only
        )
        async for part in listed:
            yield pb.ListChunksResponse(
                chunks=[
                    pb.ListedChunk(
                        keyspace_id=chunk.keyspace,
                        chunk_hash=chunk.chunk_hash,
                        metadata=page_metadata_to_proto(chunk.metadata),
                        staging_shards=chunk.staging_shards,
                        disk_shards=chunk.disk_shards,
                        page_reads_per_minute=chunk.page_reads_per_minute,
                    )
                    for chunk in part
                ]
            )

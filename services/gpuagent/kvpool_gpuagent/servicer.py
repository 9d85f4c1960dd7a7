"""GpuAgentService: translates, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KeyspaceMismatch, NotServed, Stopped, TenantDenied
from kvpool.v1 import gpuagent_pb2, gpuagent_pb2_grpc
from kvpool.wire.convert import HASH_BYTES, check_id
from kvpool.wire.convert_engine import (
    block_ids_to_bytes,
    int64s_from_bytes,
    ipc_memory_to_proto,
    layout_to_proto,
)
from kvpool_gpuagent.core.cached_chunks import HeldChunks
from kvpool_gpuagent.core.sources import LoadSource
from kvpool_gpuagent.engine.agent import GpuAgentEngine
from kvpool_gpuagent.engine.session import CacheUse, EngineSession
from kvpool_gpuagent.engine.waiting import cancellation, until_cancelled
from kvpool_gpuagent.messages import held_to_proto
from kvpool_gpuagent.ports import BlockIds
from kvpool_gpuagent.stream import EngineHandler, Registrar, session_rules
from kvpool_server.session_stream import SessionStream, peer_address

BORROW_TIMEOUT_S = 20.0  # until the first message must have come, as for the request of a unary call
RETURN_TIMEOUT_S = 5.0  # a borrower that still has copies running then reads on, but none of them will count

Requests = AsyncIterator[gpuagent_pb2.LendCacheRequest]
Write = Callable[[gpuagent_pb2.LendCacheResponse], Coroutine[Any, Any, None]]


class SharedCaches:
    """Serves LendCache: shares sessions' caches with other agents of this host."""

    def __init__(self, engine: GpuAgentEngine, tenant: Callable[[], str]) -> None:
        """tenant: of the caller."""
        self._engine, self._tenant = engine, tenant

    async def serve(self, requests: Requests, write: Write) -> None:
        """Until the borrower ends the stream, or the session does and has waited for it. Raises what refuses it."""
        try:
            async with asyncio.timeout(BORROW_TIMEOUT_S):
                first = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"LendCache: no `borrow` came within {BORROW_TIMEOUT_S:g} s") from None
        if first is None or not first.HasField("borrow"):
            raise InvalidRequest("the first message of LendCache must be `borrow`")
        session = self._shareable(first.borrow)
        with session.share() as use:
            # A borrower that reads no answers must not keep the session from ending.
            await until_cancelled(write(gpuagent_pb2.LendCacheResponse(lent=_lent(session))), use.stop)
            await _answer(requests, write, use, session.generations)

    def find(self, wanted: gpuagent_pb2.FindCachedChunksRequest) -> list[HeldChunks]:
        """Return what sessions' caches hold. Raises TenantDenied, InvalidRequest."""
        self._check_tenant()
        keyspace = check_id(wanted.keyspace_id, "keyspace_id")
        if len(wanted.chunk_hashes) % HASH_BYTES:
            raise InvalidRequest(f"chunk_hashes must be a multiple of {HASH_BYTES} bytes")
        count, most = len(wanted.chunk_hashes) // HASH_BYTES, self._engine.config.max_request_chunks
        if count > most:
            raise InvalidRequest(f"a request names at most {most} chunks, got {count}")
        return self._engine.caches.held(keyspace, wanted.chunk_hashes, wanted.engine_id)

    def _check_tenant(self) -> None:
        if self._tenant() != self._engine.config.tenant:
            raise TenantDenied("this agent's engines are of another tenant")

    def _shareable(self, wanted: gpuagent_pb2.BorrowCache) -> EngineSession:
        self._check_tenant()
        session = self._engine.session_of(check_id(wanted.session_id, "session_id"))
        if check_id(wanted.keyspace_id, "keyspace_id") != session.rank.keyspace:
            raise KeyspaceMismatch("the session has another keyspace than the borrower's")
        if not session.handles or any(handle.ipc is None for handle in session.handles):
            raise NotServed("the session's cache is not GPU memory: there is nothing that another agent could map")
        return session


async def _answer(requests: Requests, write: Write, use: CacheUse, generations: Callable[[BlockIds], BlockIds]) -> None:
    ending = asyncio.ensure_future(cancellation(use.stop))
    reading = asyncio.ensure_future(anext(requests, None))
    try:
        while True:
            await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                break
            request = reading.result()
            if request is None:
                return
            check = request.check
            if check.number <= 0:
                raise InvalidRequest(f"check.number must be > 0, got {check.number}")
            now = generations(int64s_from_bytes(check.block_ids, "check.block_ids"))
            alive = gpuagent_pb2.CacheAlive(number=check.number, generations=block_ids_to_bytes(now))
            await until_cancelled(write(gpuagent_pb2.LendCacheResponse(alive=alive)), use.stop)  # as `lent`
            reading = asyncio.ensure_future(anext(requests, None))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETURN_TIMEOUT_S):
                await write(gpuagent_pb2.LendCacheResponse(ending=gpuagent_pb2.LendCacheEnding()))
                while await reading is not None:  # checks that crossed `ending` get no answer
                    reading = asyncio.ensure_future(anext(requests, None))
                return
        raise Stopped(f"the session has ended, and the borrower kept its cache for {RETURN_TIMEOUT_S:g} s")
    finally:
        ending.cancel()
        reading.cancel()


def _lent(session: EngineSession) -> gpuagent_pb2.LentCache:
    return gpuagent_pb2.LentCache(
        handles=[
            gpuagent_pb2.MemoryHandle(size_bytes=handle.size_bytes, cuda_ipc=ipc_memory_to_proto(handle.ipc))
            for handle in session.handles
            if handle.ipc is not None
        ],
        layout=layout_to_proto(session.rank.layout),
    )


class GpuAgentServicer(gpuagent_pb2_grpc.GpuAgentServiceServicer):
    """See proto/kvpool/v1/gpuagent.proto."""

    def __init__(
        self, registrar: Registrar, node_id: bytes, page_pool: str, tenant: Callable[[], str] | None = None
    ) -> None:
        """page_pool: "arena" or "remote". tenant: of the caller; None: everybody is the configured one."""
        self._registrar, self._engine = registrar, registrar.engine
        self._lender = SharedCaches(self._engine, tenant or (lambda: self._engine.config.tenant))
        self._node_id, self._page_pool = node_id, page_pool

    async def EngineSession(  # type: ignore[override]  # a coroutine that writes: its end is known when it is over
        self, request_iterator: AsyncIterator[gpuagent_pb2.EngineRequest], context: Any
    ) -> None:
        stream = SessionStream(
            session_rules(self._engine.config), EngineHandler(self._registrar, peer_address(context.peer()))
        )
        await stream.serve(request_iterator, context.write)

    async def GetAgentStatus(
        self, request: gpuagent_pb2.GetAgentStatusRequest, context: Any
    ) -> gpuagent_pb2.GetAgentStatusResponse:
        bandwidths = self._engine.bandwidths
        return gpuagent_pb2.GetAgentStatusResponse(
            node_id=self._node_id,
            device=self._engine.device.name,
            page_pool=self._page_pool,
            sessions=[
                gpuagent_pb2.EngineSessionStatus(
                    engine_name=session.engine_name,
                    keyspace_name=session.keyspace_name,
                    active_requests=session.active_requests,
                )
                for session in self._engine.sessions
            ],
            staging_bytes_per_s=bandwidths.bytes_per_s(LoadSource.STAGING),
            disk_bytes_per_s=bandwidths.bytes_per_s(LoadSource.DISK),
            remote_bytes_per_s=bandwidths.bytes_per_s(LoadSource.REMOTE),
        )

    async def LendCache(  # type: ignore[override]  # as EngineSession
        self, request_iterator: AsyncIterator[gpuagent_pb2.LendCacheRequest], context: Any
    ) -> None:
        _check_local(context.peer())
        await self._lender.serve(request_iterator, context.write)

    async def FindCachedChunks(
        self, request: gpuagent_pb2.FindCachedChunksRequest, context: Any
    ) -> gpuagent_pb2.FindCachedChunksResponse:
        _check_local(context.peer())
        return gpuagent_pb2.FindCachedChunksResponse(caches=map(held_to_proto, self._lender.find(request)))


def _check_local(peer: str) -> None:
    """Raises NotServed for a caller over TCP: who may open the socket may map the memory, and end sessions by name."""
    if not peer.startswith("unix:"):
        raise NotServed("caches are shared between agents of one host: call this on the agent's unix socket")

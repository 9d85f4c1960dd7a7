"""The cache of an engine session, lent by its agent to another agent of the host."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvpool.client.channel import open_channel
from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import GpuRegion
from kvpool.client.session_stream import SessionStream, SingleReply
from kvpool.core.errors import InvalidRequest, KvPoolError, Stopped
from kvpool.core.layout import EngineLayout
from kvpool.v1 import gpuagent_pb2
from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceStub
from kvpool.wire.convert_engine import (
    BlockIds,
    Int64s,
    block_ids_to_bytes,
    int64s_from_bytes,
    ipc_memory_from_proto,
    layout_from_proto,
)

if TYPE_CHECKING:
    from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceAsyncStub

_Request = gpuagent_pb2.LendCacheRequest
_Response = gpuagent_pb2.LendCacheResponse

_BORROW = -1  # what `lent` answers; checks count from 1


class CacheLoan:
    """One open loan. Belongs to one event loop.

    layout, regions: as the engine registered them; whether they fit each other is the layout's `validate` to say.
    ended:           set when the lender wants the cache back or cannot be reached: no copy may begin any more, and
                     `close` is due once those that run have ended and the memory is unmapped.
    """

    def __init__(self, endpoint: str, config: ClientConfig) -> None:
        """Use `open`."""
        self.ended = asyncio.Event()
        self.layout: EngineLayout
        self.regions: tuple[GpuRegion, ...] = ()
        self._checks: set[SingleReply[_Response]] = set()
        channel = open_channel(endpoint, config)
        stub: GpuAgentServiceAsyncStub = GpuAgentServiceStub(channel)
        self._stream: SessionStream[_Request, _Response] = SessionStream(
            stub.LendCache(metadata=config.metadata),
            config,
            name="cache loan",
            channel=channel,
            on_broken=lambda error: self.ended.set(),
            on_unasked=lambda response: self._end(),  # `ending`
            request_id_of=lambda response: response.alive.number or (_BORROW if response.HasField("lent") else 0),
        )

    @classmethod
    async def open(
        cls, endpoint: str, session_id: bytes, keyspace: bytes, config: ClientConfig, *, timeout_s: float
    ) -> CacheLoan:
        """Borrow a session's cache. raises: SessionUnknown, KeyspaceMismatch, TenantDenied, NotServed, Stopped,
        InvalidRequest, ServiceUnavailable, DeadlineExceeded."""
        loan = cls(endpoint, config)
        try:
            borrow = gpuagent_pb2.BorrowCache(session_id=session_id, keyspace_id=keyspace)
            response = await loan._stream.request(_BORROW, _Request(borrow=borrow), timeout_s=timeout_s)
            loan._take(response.lent)
        except BaseException:
            await loan.close()
            raise
        return loan

    def _take(self, lent: gpuagent_pb2.LentCache) -> None:
        regions: list[GpuRegion] = []
        for number, handle in enumerate(lent.handles):
            if not handle.HasField("cuda_ipc"):
                raise InvalidRequest(f"handles[{number}] of the lent cache is no GPU memory")
            memory = ipc_memory_from_proto(handle.cuda_ipc, f"handles[{number}]", handle.size_bytes)
            regions.append(GpuRegion(handle.size_bytes, memory))
        self.regions = tuple(regions)
        self.layout = layout_from_proto(lent.layout, lent.handles)

    async def check(self, block_ids: BlockIds, timeout_s: float) -> Int64s:
        """Return what generations blocks have now, if the session has been alive until now.

        raises: Stopped, ServiceUnavailable, DeadlineExceeded; InvalidRequest for blocks that it has not.
        """
        if self.ended.is_set():
            raise self._over()
        number = self._stream.next_id()
        check = gpuagent_pb2.CheckCache(number=number, block_ids=block_ids_to_bytes(block_ids))
        reply = SingleReply[_Response]()
        self._checks.add(reply)
        try:
            response = await self._stream.request(number, _Request(check=check), timeout_s=timeout_s, reply=reply)
        finally:
            self._checks.discard(reply)
        return int64s_from_bytes(response.alive.generations, "generations")

    def _end(self) -> None:
        """The lender wants the cache back: it answers no check any more."""
        self.ended.set()
        for reply in list(self._checks):
            reply.fail(self._over())

    def _over(self) -> KvPoolError:
        failure = self._stream.failure
        if failure is not None:
            return failure
        return Stopped("the source session ended while it was pulled from")

    async def close(self) -> None:
        """Give the cache back. Idempotent, never raises."""
        await self._stream.abort("the loan was given back")

"""A session with a pagestore: leases of arena slots, and the slots' bytes where the pagestore is on this host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvpool.client.acquisition import Acquisition, SettlingRequest, SpanAcquisition
from kvpool.client.channel import open_channel
from kvpool.client.config import ClientConfig
from kvpool.client.fds import descriptor_path, fetch_fd
from kvpool.client.page_items import (
    AcquireItem,
    ReserveItem,
    ReserveResult,
    acquire_to_proto,
    reserve_result_from_proto,
    reserve_to_proto,
)
from kvpool.client.segments import FetchFd, MapHook, SegmentMap
from kvpool.client.session_stream import Reply, SessionStream
from kvpool.core.chunks import Int64s
from kvpool.core.errors import InvalidRequest, KvPoolError, LeaseLost
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.spans import PageGrants, PageSpan, SpanAnswer
from kvpool.core.tracing import NO_SPAN, PAGES, Span, SpanKind, rpc_attributes
from kvpool.v1 import pagestore_pb2
from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceStub
from kvpool.wire.convert import check_id, item_error_from_proto
from kvpool.wire.convert_keyspace import session_keyspaces_to_proto
from kvpool.wire.convert_spans import AnsweredPages, page_span_to_proto, span_answer_from_proto
from kvpool.wire.versions import check_peer_version, own_version_to_proto

if TYPE_CHECKING:
    from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceAsyncStub

_log = logging.getLogger(__name__)

_RELEASE_DELAY_S = 0.002  # by then a busy session has sent something that the ends of reads could go with
_PREPARE_POLL_S = 0.1  # some hundred MiB more are in place by then

_RPC = rpc_attributes("PageStoreService", "Session")
_Request = pagestore_pb2.SessionRequest
_Response = pagestore_pb2.SessionResponse
_Stream = SessionStream[_Request, _Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """How a session is opened. keyspaces: (16-byte id, spec) pairs."""

    endpoint: str  # "unix:/path" or "host:port"
    peer_name: str
    keyspaces: tuple[tuple[bytes, KeyspaceSpec], ...] = ()
    wants_arena: bool = True  # map the arena: same host only
    expected_incarnation: int = 0  # 0: any
    previous_session_id: bytes = b""
    previous_drained: bool = False
    trusts_arena: bool = False  # takes pages that nothing has summed yet, and does not verify what it reads


class _EndedReads:
    """Leases of reads that have ended: they go with the next request, or after a moment on their own."""

    def __init__(self) -> None:
        self._lease_ids: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, lease_ids: Sequence[int] | Int64s, send_later: Callable[[], None]) -> None:
        """send_later: called after the moment if they have not gone."""
        self._lease_ids.extend(_numbers(lease_ids))
        if self._timer is None and self._lease_ids:
            self._timer = asyncio.get_running_loop().call_later(_RELEASE_DELAY_S, send_later)

    def go_with(self, message: _Request) -> None:
        """Put them into a request that is about to be written. The server looks at those that it answers alone."""
        if self._lease_ids and message.request_id:
            message.released_lease_ids.extend(self.take())

    def take(self) -> list[int]:
        """All; there are none then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken, self._lease_ids = self._lease_ids, []
        return taken


class PageStoreSession:
    """One session from `open` to `close` or to its break. Belongs to one event loop; `slot_view` works in any thread.

    When the session breaks, every pending and later call raises ServiceUnavailable (or what the pagestore said). Slots
    that were leased must not be touched by new work then; mappings stay valid, so that running copies do no harm. Once
    all of them have ended, `reopen(drained=True)` unmaps everything and opens the next session.
    """

    def __init__(
        self,
        plan: SessionPlan,
        config: ClientConfig,
        stream: _Stream,
        ended_reads: _EndedReads,
        fetch: FetchFd,
        on_map: MapHook | None,
    ) -> None:
        """Use `open`."""
        self._ended_reads = ended_reads
        self._plan = plan
        self._config = config
        self._stream = stream
        self._fetch = fetch
        self._on_map = on_map
        self._opened = pagestore_pb2.SessionOpened()
        self._segments: SegmentMap | None = None
        self._keyspaces = dict(plan.keyspaces)
        self._closed = False

    @classmethod
    async def open(
        cls, plan: SessionPlan, config: ClientConfig, *, fetch: FetchFd = fetch_fd, on_map: MapHook | None = None
    ) -> PageStoreSession:
        """on_map: see segments.MapHook.

        raises: StaleIncarnation, TenantDenied, InvalidRequest, Overloaded, Draining, ServiceUnavailable,
        DeadlineExceeded."""
        channel = open_channel(plan.endpoint, config)
        stub: PageStoreServiceAsyncStub = PageStoreServiceStub(channel)
        call = stub.Session(metadata=config.metadata)
        ended = _EndedReads()
        stream: _Stream = SessionStream(call, config, name="pagestore session", channel=channel, on_write=ended.go_with)
        session = cls(plan, config, stream, ended, fetch, on_map)
        try:
            await session._open()
        except BaseException:
            await session._stream.abort("the session was not opened")
            raise
        return session

    async def _open(self) -> None:
        plan = self._plan
        response = await self._stream.ask(
            _Request(
                open=pagestore_pb2.SessionOpen(
                    keyspaces=session_keyspaces_to_proto(plan.keyspaces),
                    peer_name=plan.peer_name[:128],
                    previous_session_id=plan.previous_session_id,
                    previous_drained=plan.previous_drained,
                    expected_incarnation=plan.expected_incarnation,
                    wants_arena=plan.wants_arena,
                    trusts_arena=plan.trusts_arena,
                    version=own_version_to_proto(),
                )
            ),
            self._config.connect_timeout_s,
        )
        self._opened = response.opened
        check_peer_version(self._opened.version, "the pagestore")
        check_id(self._opened.session_id, "session_id")
        heartbeat = _Request(heartbeat=pagestore_pb2.SessionHeartbeat())
        self._stream.start_heartbeats(heartbeat, self._opened.heartbeat_interval_ms)
        if plan.wants_arena:
            self._segments = SegmentMap(
                descriptor_path(plan.endpoint, self._opened.descriptor_socket),
                self._opened.descriptor_token,
                timeout_s=self._config.connect_timeout_s,
                fetch=self._fetch,
                on_map=self._on_map,
            )
            await self._segments.open()

    @property
    def trusts_arena(self) -> bool:
        """See SessionPlan."""
        return self._plan.trusts_arena

    @property
    def session_id(self) -> bytes:
        """16 bytes."""
        return self._opened.session_id

    @property
    def node_id(self) -> bytes:
        """16-byte id of the pagestore."""
        return self._opened.node_id

    @property
    def incarnation(self) -> int:
        """Incarnation of the pagestore."""
        return self._opened.incarnation

    @property
    def max_leases(self) -> int:
        """Leases of each kind that may be held at once."""
        return self._opened.max_leases

    @property
    def arena_bytes(self) -> int:
        """Bytes that the pagestore's arena may take at most; 0 if it does not say."""
        return self._opened.arena_bytes

    @property
    def broken(self) -> asyncio.Event:
        """Set when the session has ended, for whatever reason."""
        return self._stream.broken

    async def add_keyspace(self, keyspace: bytes, spec: KeyspaceSpec, *, timeout_s: float | None = None) -> None:
        """Allow a keyspace in this session. raises: TenantDenied, InvalidRequest."""
        message = session_keyspaces_to_proto([(keyspace, spec)])[0]
        await self._stream.ask(_Request(add_keyspace=message), timeout_s)
        self._keyspaces[keyspace] = spec

    async def reserve(self, items: Sequence[ReserveItem], *, timeout_s: float | None = None) -> list[ReserveResult]:
        """Ask for slots to write, per item in order. A caller that is cancelled or too late leaves no lease."""

        def undo(response: _Response) -> None:
            self.abort_soon([result.slot.lease_id for result in response.reserve.results if result.slot.lease_id])

        with self._span("reserve", len(items)):
            response = await self._stream.ask(_Request(reserve=reserve_to_proto(items)), timeout_s, undo)
        try:
            if len(response.reserve.results) != len(items):
                raise InvalidRequest(f"{len(response.reserve.results)} results for {len(items)} items of a reserve")
            results = [reserve_result_from_proto(result) for result in response.reserve.results]
            await self._map({result.slot.segment_id for result in results if result.slot is not None})
        except BaseException:
            undo(response)
            raise
        return results

    async def reserve_span(self, span: PageSpan, *, timeout_s: float | None = None) -> SpanAnswer:
        """Ask for slots to write pages of a chain into; their sizes follow from keyspace and shard. A caller that is
        cancelled or too late leaves no lease."""

        def undo(response: _Response) -> None:
            self.abort_soon(response.span_answer.lease_ids)

        message = _Request(reserve_span=pagestore_pb2.ReserveSpanRequest(span=page_span_to_proto(span)))
        with self._span("reserve", span.page_count):
            response = await self._stream.ask(message, timeout_s, undo)
        try:
            answer = span_answer_from_proto(response.span_answer, span.page_count)
            AnsweredPages(span.page_count).note(answer, final=True)
            await self._map(set(answer.granted.segment_ids.tolist()))
        except BaseException:
            undo(response)
            raise
        return answer

    async def commit(
        self, lease_ids: Sequence[int] | Int64s, *, sealed: bool = True, timeout_s: float | None = None
    ) -> list[tuple[int, KvPoolError]]:
        """Make written pages visible. The leases have ended either way.

        sealed: headers are in place, and pages are verified; else the pagestore writes headers when needed.
        returns: for the pages that failed their position in lease_ids, and PageCorrupt or LeaseLost.

        A caller that is cancelled does not learn whether the pages are visible; nothing is leaked.
        """
        if not len(lease_ids):
            return []
        message = _Request(commit=pagestore_pb2.CommitRequest(lease_ids=_numbers(lease_ids), unsealed=not sealed))
        with self._span("commit", len(lease_ids)):
            response = await self._stream.ask(message, timeout_s)
        if len(response.commit.results) != len(lease_ids):
            raise InvalidRequest(f"{len(response.commit.results)} results for {len(lease_ids)} leases of a commit")
        return [
            (index, item_error_from_proto(result.error))
            for index, result in enumerate(response.commit.results)
            if result.HasField("error")
        ]

    def abort_soon(self, lease_ids: Sequence[int] | Int64s) -> None:
        """Give slots back unwritten; a broken session needs none. Returns before they are back."""
        self._stream.send_soon(_Request(abort=pagestore_pb2.AbortRequest(lease_ids=_numbers(lease_ids))))

    def acquire(self, items: Sequence[AcquireItem], *, wait_s: float) -> Acquisition:
        """Ask for pages to read: `async with session.acquire(...) as results: async for result in results: ...`."""
        message = _Request(acquire=acquire_to_proto(items, _wait_ms(wait_s)))
        return Acquisition(self._settling(message, len(items), wait_s))

    def acquire_span(self, span: PageSpan, *, wait_s: float) -> SpanAcquisition:
        """The same for pages of a chain; each result is a SpanAnswer, and its segments are mapped."""
        request = pagestore_pb2.AcquireSpanRequest(span=page_span_to_proto(span), wait_ms=_wait_ms(wait_s))
        return SpanAcquisition(span.page_count, self._settling(_Request(acquire_span=request), span.page_count, wait_s))

    def _settling(self, message: _Request, page_count: int, wait_s: float) -> SettlingRequest:
        span = self._span("acquire", page_count)

        async def submit(acquisition: Reply[_Response]) -> None:
            with span.current():
                await self._stream.submit(message, acquisition)

        def is_mapped(segment_id: int) -> bool:
            return self._segments is not None and self._segments.is_mapped(segment_id)

        return SettlingRequest(
            submit=submit,
            is_mapped=is_mapped,
            map_segments=self._map,
            release=self.release_soon,
            span=span,
            timeout_s=wait_s + self._config.call_timeout_s,  # the pagestore gives up first
        )

    async def release(self, lease_ids: Sequence[int] | Int64s, *, corrupt_lease_ids: Sequence[int] = ()) -> None:
        """End reads; `corrupt` ones failed verification. Sent before anything is awaited."""
        message = pagestore_pb2.ReleaseRequest(lease_ids=_numbers(lease_ids), corrupt_lease_ids=corrupt_lease_ids)
        await self._stream.give_back(_Request(release=message))

    def release_soon(self, lease_ids: Sequence[int] | Int64s) -> None:
        """The same without waiting, with the next request or in a moment; a broken session needs none."""
        self._ended_reads.add(lease_ids, self._send_ended_reads)

    async def prepare(self, share_bytes: int) -> tuple[int, ...]:
        """Have segments assigned to the tenant ahead of use, and map them: all segments of the tenant.

        share_bytes: what the tenant is to have in all; 0: everything, or half of what is free beside other tenants.
        Returns when the pagestore, which puts the memory in place after its start, has no more to come; segments are
        mapped as they come. They may be less than asked for. raises: InvalidRequest, and what breaks the session.
        """
        segments = self._arena()
        message = _Request(prepare=pagestore_pb2.PrepareRequest(share_bytes=share_bytes))
        while True:
            answer = (await self._stream.ask(message)).prepare
            try:
                await segments.map(answer.segment_ids)
            except LeaseLost:  # one that we did not map yet went to another tenant
                continue
            if not answer.more:
                return tuple(answer.segment_ids)
            await asyncio.sleep(_PREPARE_POLL_S)

    def slot_view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes of a slot that this session granted. raises: LeaseLost when unmapped."""
        return self._arena().view(segment_id, offset, size_bytes)

    def addresses(self, grants: PageGrants) -> Int64s:
        """[M] process addresses of the pages' first bytes, while this session is not closed. raises: LeaseLost."""
        return self._arena().addresses(grants.segment_ids, grants.offsets)

    async def close(self) -> bool:
        """End the session normally; all leases must have ended. Idempotent.

        False if the pagestore did not confirm, or views of slots still live: then the end is abnormal on purpose, and
        the pagestore waits until this process has let go of its mappings.
        """
        if self._closed:
            return True
        self._closed = True
        self._send_ended_reads()
        if await self._unmap():
            return await self._stream.finish(_Request(close=pagestore_pb2.SessionClose()))
        await self._stream.abort("the session was closed while views of its slots live")
        return False

    async def reopen(self, *, drained: bool) -> PageStoreSession:
        """End this session, unmap it and open its successor. May be called again after a failure.

        drained: every copy and kernel on this session's slots has ended. It is reported to the pagestore only if no
        view of a slot lives any more; else it keeps the slots until this process lets go of them. raises: as `open`
        does.
        """
        self._closed = True
        await self._stream.abort("the session is reopened")
        plan = replace(
            self._plan,
            keyspaces=tuple(self._keyspaces.items()),
            previous_session_id=self.session_id,
            previous_drained=await self._unmap() and drained,
        )
        if drained and not plan.previous_drained:
            _log.warning("views of arena slots outlive their session %s: its slots stay blocked", self.session_id.hex())
        return await PageStoreSession.open(plan, self._config, fetch=self._fetch, on_map=self._on_map)

    def _send_ended_reads(self) -> None:
        lease_ids = self._ended_reads.take()
        if lease_ids:
            release = pagestore_pb2.ReleaseRequest(lease_ids=lease_ids)
            self._stream.send_soon(_Request(release=release), first=True)

    def _span(self, operation: str, page_count: int) -> Span:
        tracer = self._config.tracer
        if not tracer.recording:
            return NO_SPAN
        return tracer.part(
            f"kvpool.pagestore.{operation}", kind=SpanKind.CLIENT, attributes={**_RPC, PAGES: page_count}
        )

    async def _unmap(self) -> bool:
        if self._segments is None:
            return True
        await self._segments.stop()
        return await asyncio.to_thread(self._segments.close)  # a device takes a second to let go of 64 GiB

    def _arena(self) -> SegmentMap:
        if self._segments is None:
            raise InvalidRequest("this session has no arena; open it with wants_arena")
        return self._segments

    async def _map(self, segment_ids: Iterable[int]) -> None:
        if self._segments is not None:
            await self._segments.map(segment_ids)


def _numbers(lease_ids: Sequence[int] | Int64s) -> Sequence[int]:
    return lease_ids.tolist() if isinstance(lease_ids, np.ndarray) else lease_ids


def _wait_ms(wait_s: float) -> int:
    return max(1, round(wait_s * 1e3))

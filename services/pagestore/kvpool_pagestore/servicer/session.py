"""What a pagestore does with the messages of a session; kvpool_server.session_stream runs the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool.core.errors import KvPoolError
from kvpool.core.spans import SpanAnswer
from kvpool.core.tracing import NO_TRACER, Span, Tracer
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert_keyspace import session_keyspace_from_proto
from kvpool.wire.convert_spans import page_span_from_proto, span_answer_to_proto
from kvpool.wire.versions import own_version_to_proto
from kvpool_pagestore.engine.fetch import Acquired
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.engine.store import PageStoreEngine
from kvpool_pagestore.servicer import messages
from kvpool_pagestore.servicer.spans import (
    AcquireCounts,
    note_committed,
    note_reserved,
    note_span_reserved,
    request_span,
)
from kvpool_server.session_stream import End, Role, SessionRules

_ROLES = {
    "open": Role.OPEN,
    "reserve": Role.REQUEST,
    "reserve_span": Role.REQUEST,
    "commit": Role.REQUEST,
    "acquire": Role.REQUEST,
    "acquire_span": Role.REQUEST,
    "release": Role.NOTICE,
    "abort": Role.NOTICE,
    "prepare": Role.NOTICE,
    "add_keyspace": Role.NOTICE,
    "heartbeat": Role.HEARTBEAT,
    "close": Role.CLOSE,
}

_Send = Callable[[pb.SessionResponse], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What a session gets when it opens."""

    node_id: bytes
    descriptor_socket: Path
    heartbeat_interval_ms: int
    max_leases: int
    max_requests_in_flight: int
    arena_bytes: int

    def rules(self) -> SessionRules[pb.SessionResponse]:
        """Limits and deadlines for the runtime. What a commit has begun on disk ends without its request."""
        return SessionRules(
            roles=_ROLES,
            response=pb.SessionResponse,
            requests_max=self.max_requests_in_flight,
            heartbeat_s=self.heartbeat_interval_ms / 1e3,
            cancels_requests=True,
        )


class PageStoreHandler:
    """One session. See kvpool_server.session_stream.SessionHandler."""

    def __init__(
        self, engine: PageStoreEngine, limits: SessionLimits, tenant: str, address: str, tracer: Tracer = NO_TRACER
    ) -> None:
        """tenant, address: of the caller."""
        self._engine, self._limits, self._tracer = engine, limits, tracer
        self._tenant, self._address = tenant, address
        self._opened: asyncio.Future[PeerSession] = asyncio.get_running_loop().create_future()

    async def open(self, request: pb.SessionRequest, send: _Send) -> None:
        wanted = messages.session_request_from_proto(request.open, self._tenant, self._address)
        self._opened.set_result(await self._engine.open_session(wanted, request.open.expected_incarnation))
        send(self._opened_to_proto())

    def handle_now(self, request: pb.SessionRequest) -> pb.SessionResponse | None:
        self._end_reads(request)
        match request.WhichOneof("kind"):
            case "release":
                ended = request.release
                self._engine.pages.release(self._peer, ended.lease_ids, ended.corrupt_lease_ids)
                return pb.SessionResponse(release=pb.ReleaseResponse()) if request.request_id else None
            case "abort":
                self._engine.pages.abort(self._peer, request.abort.lease_ids)
                return pb.SessionResponse(abort=pb.AbortResponse()) if request.request_id else None
            case "prepare":
                segment_ids, more = self._engine.prepare(self._peer, request.prepare.share_bytes)
                return pb.SessionResponse(prepare=pb.PrepareResponse(segment_ids=segment_ids, more=more))
            case _:
                self._engine.sessions.add_keyspace(self._peer, *session_keyspace_from_proto(request.add_keyspace))
                return self._opened_to_proto()

    async def handle(self, request: pb.SessionRequest, send: _Send, span: Span) -> pb.SessionResponse:
        self._end_reads(request)
        match request.WhichOneof("kind"):
            case "reserve":
                return await self._reserve(request.reserve, span)
            case "reserve_span":
                return await self._reserve_span(request.reserve_span, span)
            case "commit":
                return await self._commit(request.commit, span)
            case "acquire":
                return await self._acquire(request.acquire, send, span)
            case _:
                return await self._acquire_span(request.acquire_span, send, span)

    def refused(self, request: pb.SessionRequest) -> None:
        if self._opened.done():
            self._end_reads(request)

    def span(self, request: pb.SessionRequest) -> Span:
        return request_span(self._tracer, request)

    async def ended(self) -> KvPoolError:
        # Shielded: who waits here may be cancelled, and that must not cancel the future.
        peer = await asyncio.shield(self._opened)
        return await asyncio.shield(peer.ended)

    async def end(self, end: End) -> None:
        if not self._opened.done():
            self._opened.cancel()
        elif end.error is None:
            self._engine.sessions.close(self._peer)
        else:
            self._engine.sessions.end(self._peer, str(end.error))

    # Inside

    def _end_reads(self, request: pb.SessionRequest) -> None:
        if request.released_lease_ids:
            self._engine.pages.release(self._peer, request.released_lease_ids)

    @property
    def _peer(self) -> PeerSession:
        return self._opened.result()

    def _opened_to_proto(self) -> pb.SessionResponse:
        """The answer to `open` and `add_keyspace`."""
        limits, peer = self._limits, self._peer
        return pb.SessionResponse(
            opened=pb.SessionOpened(
                session_id=peer.session.session_id,
                incarnation=self._engine.incarnation,
                descriptor_socket=str(limits.descriptor_socket) if peer.token else "",
                descriptor_token=peer.token,
                heartbeat_interval_ms=limits.heartbeat_interval_ms,
                max_leases=limits.max_leases,
                node_id=limits.node_id,
                version=own_version_to_proto(),
                arena_bytes=limits.arena_bytes,
            )
        )

    async def _reserve(self, request: pb.ReserveRequest, span: Span) -> pb.SessionResponse:
        items = messages.reserve_items_from_proto(request, self._limits.max_leases)
        answers = await self._engine.pages.reserve(self._peer, items)
        note_reserved(span, answers)
        return pb.SessionResponse(reserve=messages.reserve_results_to_proto(answers))

    async def _reserve_span(self, request: pb.ReserveSpanRequest, span: Span) -> pb.SessionResponse:
        pages = page_span_from_proto(request.span, self._limits.max_leases)
        answer = await self._engine.spans.reserve(self._peer, pages)
        note_span_reserved(span, answer)
        return pb.SessionResponse(span_answer=span_answer_to_proto(answer, final=True))

    async def _commit(self, request: pb.CommitRequest, span: Span) -> pb.SessionResponse:
        lease_ids = list(request.lease_ids)
        errors = await self._engine.pages.commit(self._peer, lease_ids, sealed=not request.unsealed)
        note_committed(span, errors)
        return pb.SessionResponse(commit=messages.lease_results_to_proto(errors))

    async def _acquire(self, request: pb.AcquireRequest, send: _Send, span: Span) -> pb.SessionResponse:
        wanted = messages.wanted_pages_from_proto(request, self._limits.max_leases)
        wait_s = messages.wait_s_from_proto(request)
        counts = AcquireCounts(span, len(wanted))
        last: asyncio.Future[pb.SessionResponse] = asyncio.get_running_loop().create_future()

        def on_acquired(acquired: Sequence[Acquired], final: bool) -> None:
            counts.note(acquired)
            _send_part(pb.SessionResponse(acquire=messages.acquired_to_proto(acquired, final)), final, last, send)

        with counts.noted():
            self._engine.pages.acquire(self._peer, wanted, wait_s=wait_s, on_acquired=on_acquired)
            return await last

    async def _acquire_span(self, request: pb.AcquireSpanRequest, send: _Send, span: Span) -> pb.SessionResponse:
        pages = page_span_from_proto(request.span, self._limits.max_leases)
        wait_s = messages.wait_s_from_proto(request)
        keyspace = self._peer.keyspace(pages.keyspace)
        counts = AcquireCounts(span, pages.page_count)
        last: asyncio.Future[pb.SessionResponse] = asyncio.get_running_loop().create_future()

        def page_bytes(page: int) -> int:
            return keyspace.page_bytes(int(pages.shards[page])) if keyspace is not None else 0

        def on_answer(answer: SpanAnswer, final: bool) -> None:
            counts.note_span(answer, page_bytes)
            _send_part(pb.SessionResponse(span_answer=span_answer_to_proto(answer, final=final)), final, last, send)

        with counts.noted():
            self._engine.spans.acquire(self._peer, pages, wait_s=wait_s, on_answer=on_answer)
            return await last


def _send_part(part: pb.SessionResponse, final: bool, last: asyncio.Future[pb.SessionResponse], send: _Send) -> None:
    if last.done():  # cancelled: the session has ended, and what it got is in quarantine
        return
    if final:
        last.set_result(part)
    else:
        send(part)

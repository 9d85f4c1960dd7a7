"""One session stream: requests come in, answers go out as they are ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpool.core.errors import InvalidRequest, KvPoolError, Overloaded, Stopped
from kvpool.core.spans import SpanAnswer
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool.v1 import common_pb2
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import item_error_to_proto
from kvpool.wire.convert_keyspace import session_keyspace_from_proto
from kvpool.wire.convert_spans import page_span_from_proto, span_answer_to_proto
from kvpool.wire.versions import own_version_to_proto
from kvpool_pagestore.engine import PageStoreEngine
from kvpool_pagestore.engine_acquire import Acquired
from kvpool_pagestore.engine_sessions import PeerSession
from kvpool_pagestore.servicer import messages
from kvpool_pagestore.servicer.spans import AcquireSpan, note_committed, note_reserved, note_span_reserved, request_span
from kvpool_server.logs import note_request

_log = logging.getLogger(__name__)

_OUTBOX_MESSAGES = 4096  # a peer that lets so many answers pile up does not read


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What a session gets when it opens."""

    node_id: bytes
    descriptor_socket: Path
    heartbeat_interval_ms: int
    max_leases: int
    max_requests_in_flight: int
    arena_bytes: int


class SessionStream:
    """Serves one stream. Whatever ends it, the session is over afterwards: closed if the peer said so, else ended."""

    def __init__(
        self, engine: PageStoreEngine, limits: SessionLimits, peer: PeerSession, tracer: Tracer = NO_TRACER
    ) -> None:
        self._tracer = tracer
        self._engine = engine
        self._limits = limits
        self._peer = peer
        self._outbox: asyncio.Queue[pb.SessionResponse | KvPoolError | None] = asyncio.Queue(_OUTBOX_MESSAGES)
        self._commits: set[asyncio.Task[None]] = set()
        self._acquires: set[AcquireSpan] = set()
        self._in_flight = 0  # commits and acquires

    async def answers(
        self, open_id: int, requests: AsyncIterator[pb.SessionRequest]
    ) -> AsyncGenerator[pb.SessionResponse, None]:
        """The answer to `open`, then those to what follows. Raises SessionUnknown when this side ends the session."""
        self._peer.on_ended = self._end
        reader = asyncio.get_running_loop().create_task(self._read(requests), name="session")
        try:
            yield self._opened(open_id)
            while (answer := await self._outbox.get()) is not None:
                if isinstance(answer, KvPoolError):
                    raise answer
                yield answer
        finally:
            self._peer.on_ended = _ignore
            # Only a Close is a normal end; a killed peer looks like a stream that was finished.
            self._engine.sessions.end(self._peer, "its stream broke")
            reader.cancel()
            for task in self._commits:
                task.cancel()
            await asyncio.wait([reader, *self._commits])
            for traced in self._acquires:
                traced.failed(Stopped("the session ended first"))

    # Inside

    def _opened(self, request_id: int) -> pb.SessionResponse:
        """The answer to `open` and `add_keyspace`."""
        limits, peer = self._limits, self._peer
        return pb.SessionResponse(
            request_id=request_id,
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
            ),
        )

    async def _read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        try:
            async for request in requests:
                self._engine.sessions.heard(self._peer)
                if request.WhichOneof("kind") == "close":
                    self._peer.on_ended = _ignore
                    self._engine.sessions.close(self._peer)
                    await self._outbox.put(pb.SessionResponse(closed=pb.SessionClose()))
                    break
                await self._serve(request)
            await self._outbox.put(None)
        except KvPoolError as error:
            self._end(error)
        except Exception:
            _log.exception("a session's reader failed")
            self._end(KvPoolError("the session failed; the log of the pagestore says why"))

    async def _serve(self, request: pb.SessionRequest) -> None:
        note_request(request.request_id)
        try:
            await self._dispatch(request)
        except KvPoolError as error:
            self._peer.check_live()
            await self._answer(request.request_id, error=item_error_to_proto(error))

    async def _dispatch(self, request: pb.SessionRequest) -> None:
        kind = request.WhichOneof("kind")
        number = request.request_id
        if kind == "reserve":
            await self._reserve(request)
        elif kind == "reserve_span":
            await self._reserve_span(request)
        elif kind == "commit":
            self._start_commit(request)
        elif kind == "acquire":
            self._start_acquire(request)
        elif kind == "acquire_span":
            self._start_acquire_span(request)
        elif kind == "release":
            self._engine.pages.release(self._peer, request.release.lease_ids, request.release.corrupt_lease_ids)
            await self._answer(number, release=pb.ReleaseResponse())
        elif kind == "abort":
            self._engine.pages.abort(self._peer, request.abort.lease_ids)
            await self._answer(number, abort=pb.AbortResponse())
        elif kind == "prepare":
            segment_ids, more = self._engine.prepare(self._peer, request.prepare.share_bytes)
            prepared = pb.PrepareResponse(segment_ids=segment_ids, more=more)
            await self._outbox.put(pb.SessionResponse(request_id=number, prepare=prepared))
        elif kind == "heartbeat":
            await self._answer(0, heartbeat=pb.SessionHeartbeat())
        elif kind == "add_keyspace":
            self._engine.sessions.add_keyspace(self._peer, *session_keyspace_from_proto(request.add_keyspace))
            await self._outbox.put(self._opened(number))
        else:
            raise InvalidRequest("`open` may come only once, as the first message; every message must have a kind")

    async def _reserve(self, request: pb.SessionRequest) -> None:
        with request_span(self._tracer, request, len(request.reserve.items)) as span:
            items = messages.reserve_items_from_proto(request.reserve, self._limits.max_leases)
            answers = await self._engine.pages.reserve(self._peer, items)
            note_reserved(span, answers)
        await self._answer(request.request_id, reserve=messages.reserve_results_to_proto(answers))

    async def _reserve_span(self, request: pb.SessionRequest) -> None:
        pages = page_span_from_proto(request.reserve_span.span, self._limits.max_leases)
        with request_span(self._tracer, request, pages.page_count) as span:
            answer = await self._engine.spans.reserve(self._peer, pages)
            note_span_reserved(span, answer)
        message = span_answer_to_proto(answer, final=True)
        await self._outbox.put(pb.SessionResponse(request_id=request.request_id, span_answer=message))

    def _start_commit(self, request: pb.SessionRequest) -> None:
        self._take_turn()
        task = asyncio.get_running_loop().create_task(self._commit(request), name="commit")
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)

    async def _commit(self, request: pb.SessionRequest) -> None:
        lease_ids = list(request.commit.lease_ids)
        try:
            with request_span(self._tracer, request, len(lease_ids)) as span:
                sealed = not request.commit.unsealed
                errors = await self._engine.pages.commit(self._peer, lease_ids, sealed=sealed)
                note_committed(span, errors)
            await self._answer(request.request_id, commit=messages.lease_results_to_proto(errors))
        except InvalidRequest as error:
            await self._answer(request.request_id, error=item_error_to_proto(error))
        except KvPoolError as error:
            self._end(error)
        finally:
            self._in_flight -= 1

    def _start_acquire(self, request: pb.SessionRequest) -> None:
        number = request.request_id
        wanted = messages.wanted_pages_from_proto(request.acquire, self._limits.max_leases)
        wait_s = messages.wait_s_from_proto(request.acquire)
        self._take_turn()
        traced = AcquireSpan(request_span(self._tracer, request, len(wanted)))

        def on_acquired(acquired: Sequence[Acquired], final: bool) -> None:
            traced.settled(acquired, final)
            part = messages.acquired_to_proto(acquired, final)
            self._answer_part(traced, pb.SessionResponse(request_id=number, acquire=part), final)

        with self._acquiring(traced):
            self._engine.pages.acquire(self._peer, wanted, wait_s=wait_s, on_acquired=on_acquired)

    def _start_acquire_span(self, request: pb.SessionRequest) -> None:
        number = request.request_id
        pages = page_span_from_proto(request.acquire_span.span, self._limits.max_leases)
        wait_s = messages.wait_s_from_proto(request.acquire_span)
        keyspace = self._peer.keyspace(pages.keyspace)
        self._take_turn()
        traced = AcquireSpan(request_span(self._tracer, request, pages.page_count))

        def page_bytes(page: int) -> int:
            return keyspace.page_bytes(int(pages.shards[page])) if keyspace is not None else 0

        def on_answer(answer: SpanAnswer, final: bool) -> None:
            traced.answered(answer, final, page_bytes)
            part = span_answer_to_proto(answer, final=final)
            self._answer_part(traced, pb.SessionResponse(request_id=number, span_answer=part), final)

        with self._acquiring(traced):
            self._engine.spans.acquire(self._peer, pages, wait_s=wait_s, on_answer=on_answer)

    def _answer_part(self, traced: AcquireSpan, part: pb.SessionResponse, final: bool) -> None:
        self._in_flight -= final
        if final:
            self._acquires.discard(traced)
        try:
            self._outbox.put_nowait(part)
        except asyncio.QueueFull:
            self._engine.sessions.end(self._peer, "its peer does not read")

    @contextmanager
    def _acquiring(self, traced: AcquireSpan) -> Iterator[None]:
        """Begin an acquire whose turn was taken; if it is refused, nothing was begun."""
        self._acquires.add(traced)
        try:
            with traced.span.current():
                yield
        except KvPoolError as error:
            self._in_flight -= 1
            self._acquires.discard(traced)
            traced.failed(error)
            raise

    def _take_turn(self) -> None:
        if self._in_flight >= self._limits.max_requests_in_flight:
            raise Overloaded(f"the session has {self._in_flight} requests in flight, the limit")
        self._in_flight += 1

    async def _answer(
        self,
        number: int,
        *,
        reserve: pb.ReserveResponse | None = None,
        commit: pb.CommitResponse | None = None,
        abort: pb.AbortResponse | None = None,
        release: pb.ReleaseResponse | None = None,
        heartbeat: pb.SessionHeartbeat | None = None,
        error: common_pb2.ItemError | None = None,
    ) -> None:
        """Queue one answer; waits while the peer does not read, and then nothing more is read from it either."""
        await self._outbox.put(
            pb.SessionResponse(
                request_id=number,
                reserve=reserve,
                commit=commit,
                abort=abort,
                release=release,
                heartbeat=heartbeat,
                error=error,
            )
        )

    def _end(self, error: KvPoolError) -> None:
        """Have the stream end with an error; what is queued before it is not worth waiting for."""
        while self._outbox.full():
            self._outbox.get_nowait()
        self._outbox.put_nowait(error)


def _ignore(error: KvPoolError) -> None:
    """The stream is over already: there is nobody left to tell."""

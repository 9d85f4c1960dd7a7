"""What an agent does with the messages of an engine's session; kvpool_server.session_stream runs the stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvpool.core.errors import KvPoolError
from kvpool.core.ipc import GENERATION_BYTES, HOLD_FILE_BYTES, EngineEvent
from kvpool.core.tracing import (
    CHUNKS,
    FAILED_CHUNKS,
    KEYSPACE,
    NO_SPAN,
    REQUEST_ID,
    SERVED_CHUNKS,
    Span,
    Tracer,
    rpc_attributes,
)
from kvpool.v1 import common_pb2, gpuagent_pb2
from kvpool.wire.convert import hashes_from_bytes, item_error_to_proto
from kvpool.wire.convert_engine import engine_event_from_proto, engine_event_to_proto
from kvpool.wire.versions import own_version_to_proto, versions_from_proto
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_gpuagent.engine.agent import GpuAgentEngine, Registration
from kvpool_gpuagent.engine.descriptors import FdExchange, HoldFile
from kvpool_gpuagent.engine.events import UsedEvent
from kvpool_gpuagent.engine.session import EngineSession
from kvpool_gpuagent.messages import (
    cached_from_proto,
    compute_speed_from_proto,
    event_of,
    leased_from_proto,
    load_done_to_proto,
    match_to_proto,
    registration_from_proto,
    span_from_proto,
    store_done_to_proto,
)
from kvpool_server.logs import fields
from kvpool_server.session_stream import End, Role, SessionRules

_log = logging.getLogger(__name__)

_RPC = rpc_attributes("GpuAgentService", "EngineSession")
_HASH_BYTES = 16


def request_span(tracer: Tracer, session: EngineSession, request: gpuagent_pb2.EngineRequest) -> Span:
    """The agent's span of a match, store, load or lease."""
    if not tracer.recording:
        return NO_SPAN
    attributes = {
        **_RPC,
        KEYSPACE: session.rank.keyspace.hex(),
        CHUNKS: _chunk_count(request),
        REQUEST_ID: request.request_id,
        "kvpool.engine": session.engine_name,
    }
    return tracer.request(f"gpuagent.{request.WhichOneof('kind')}", request.trace, attributes=attributes)


def note_end(
    span: Span, engine_name: str, request: gpuagent_pb2.EngineRequest, response: gpuagent_pb2.EngineResponse
) -> None:
    """What became of it: to the span, and to the log at level debug."""
    debug = _log.isEnabledFor(logging.DEBUG)
    if not span.recording and not debug:
        return
    served, failed = _counts(response)
    span.set({SERVED_CHUNKS: served, FAILED_CHUNKS: failed})
    if response.HasField("load_done") and response.load_done.HasField("error"):
        span.fail(response.load_done.error.reason)
    if debug:
        details = fields(
            kind=request.WhichOneof("kind"),
            engine=engine_name,
            chunks=_chunk_count(request),
            served_chunks=served,
            refused=response.error.reason,
        )
        _log.debug("request ended", extra=details)


def _chunk_count(request: gpuagent_pb2.EngineRequest) -> int:
    match request.WhichOneof("kind"):
        case "match":
            return len(request.match.chunk_hashes) // _HASH_BYTES
        case "store":
            return len(request.store.chunk_hashes) // _HASH_BYTES
        case "lease":
            return len(request.lease.chunk_hashes) // _HASH_BYTES
        case _:
            return len(request.load.chunk_hashes) // _HASH_BYTES


def _counts(response: gpuagent_pb2.EngineResponse) -> tuple[int, int]:
    """Chunks that were matched, stored (or there already) or loaded, and those that failed."""
    match response.WhichOneof("kind"):
        case "match":
            return response.match.matched_chunks, 0
        case "store_done":
            done = response.store_done
            return done.stored_chunks + done.deduplicated_chunks, len(done.failed_chunks)
        case "lease_held":
            return response.lease_held.staged_chunks, 0
        case "load_done":
            return response.load_done.loaded_chunks, len(response.load_done.failed_chunks)
        case _:
            return 0, 0


OFFER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Registrar:
    """What registrations need beside the engine: where engines offer the descriptors of their memory."""

    engine: GpuAgentEngine
    desk: FdExchange
    descriptor_socket: Path

    async def map(
        self, session: EngineSession, wanted: Registration, send: Callable[[gpuagent_pb2.EngineResponse], None]
    ) -> None:
        """Take the session's descriptors if it has any, map its memory; sends `registered` and `ready`.

        Raises InvalidRequest naming a handle that does not fit or is not offered in time, Overloaded when the process
        that offers them has half of all sessions.
        """
        if wanted.match_only:
            await session.only_match()
            send(gpuagent_pb2.EngineResponse(registered=self._registered(session, b"")))
            send(gpuagent_pb2.EngineResponse(ready=self._ready()))
            return
        shared = [handle for handle in wanted.handles if handle.ipc is None]
        sizes_bytes = [handle.size_bytes for handle in shared] + [HOLD_FILE_BYTES] * wanted.hold_file
        if wanted.block_generations:
            sizes_bytes.append(wanted.layout.block_count * GENERATION_BYTES)
        inbox = self.desk.open(sizes_bytes)
        try:
            send(gpuagent_pb2.EngineResponse(registered=self._registered(session, inbox.token)))
            await inbox.wait(OFFER_TIMEOUT_S)
            self.engine.claim(session, inbox.process)
            descriptors = inbox.take()
            # Nothing is awaited in between: the descriptors always have an owner.
            generations = descriptors.pop() if wanted.block_generations else None
            hold_file = HoldFile(descriptors.pop()) if wanted.hold_file else None
            handles = [replace(handle, descriptor=fd) for handle, fd in zip(shared, descriptors, strict=True)]
            await session.map_cache(handles or wanted.handles, wanted.events, hold_file, generations)
        finally:
            self.desk.drop(inbox)
        send(gpuagent_pb2.EngineResponse(ready=self._ready()))

    def _ready(self) -> gpuagent_pb2.EngineReady:
        return gpuagent_pb2.EngineReady(
            device=self.engine.device.name,
            max_request_chunks=self.engine.config.max_request_chunks,
            link_bytes_per_s=self.engine.link_bytes_per_s,
            reads_batched=True,
        )

    def _registered(self, session: EngineSession, token: bytes) -> gpuagent_pb2.EngineRegistered:
        grid = session.rank.grid
        return gpuagent_pb2.EngineRegistered(
            session_id=session.session_id,
            keyspace_id=session.rank.keyspace,
            hash_key=session.hash_key,
            grid=common_pb2.ShardGrid(layer_groups=grid.layer_groups, splits=grid.splits),
            shards=session.rank.shards,
            descriptor_socket=str(self.descriptor_socket),
            descriptor_token=token,
            heartbeat_interval_ms=self.engine.config.heartbeat_interval_ms,
            version=own_version_to_proto(),
        )


DEFAULT_LOAD_WAIT_S = 30.0
COPIED_OUT_AFTER_S = 0.005  # an engine that keeps its blocks hears of the copy alone when the commit takes longer
_REQUESTS_PER_PLACE = 2  # matches ride along: so many requests are worked on for each load or store that may run

_ROLES = {
    "register": Role.OPEN,
    "match": Role.REQUEST,
    "store": Role.REQUEST,
    "load": Role.REQUEST,
    "lease": Role.REQUEST,
    "kept": Role.NOTICE,
    "cancel": Role.NOTICE,
    "event_recorded": Role.NOTICE,
    "cached": Role.NOTICE,
    "heartbeat": Role.HEARTBEAT,
    "close": Role.CLOSE,
}

Request = gpuagent_pb2.EngineRequest
Response = gpuagent_pb2.EngineResponse
_Send = Callable[[Response], None]


def session_rules(config: GpuAgentConfig) -> SessionRules[Response]:
    """What the runtime goes by. Requests are not cancelled: when stopped they give their slots back themselves."""
    return SessionRules(
        roles=_ROLES,
        response=Response,
        requests_max=_REQUESTS_PER_PLACE * config.max_running_requests,
        heartbeat_s=config.heartbeat_interval_ms / 1e3,
        cancels_requests=False,
        reads_batched=lambda first: first.register.reads_batched,
    )


class EngineHandler:
    """One session. See kvpool_server.session_stream.SessionHandler: once `end` and all requests have ended, nothing
    touches the engine's memory."""

    def __init__(self, registrar: Registrar, address: str) -> None:
        """address: of the engine, as peer_address gives it."""
        self._registrar, self._address, self._config = registrar, address, registrar.engine.config
        self._metrics, self._tracer = registrar.engine.metrics, registrar.engine.tracer
        self._asked: dict[int, tuple[int, asyncio.Future[bool]]] = {}
        self._opened: asyncio.Future[EngineSession] = asyncio.get_running_loop().create_future()

    async def open(self, request: Request, send: _Send) -> None:
        def event_waited(event: EngineEvent) -> None:
            send(Response(event_waited=engine_event_to_proto(event)))

        register = request.register
        wanted = registration_from_proto(register)
        session = await self._registrar.engine.open_session(wanted, event_waited, self._address)
        self._opened.set_result(session)
        await self._registrar.map(session, wanted, send)
        peer = versions_from_proto(register.version)
        _log.info("engine registered", extra=fields(engine=self._name, keyspace=register.keyspace_name, peer=str(peer)))

    def handle_now(self, request: Request) -> Response | None:
        match request.WhichOneof("kind"):
            case "kept":
                self._note_still_valid(request.request_id, request.kept)
            case "cancel":
                self._session.cancel(request.cancel.target_request_id)
            case "cached":
                self._session.announce(*cached_from_proto(request.cached))
            case _:
                self._session.events.announce(engine_event_from_proto(request.event_recorded))
        return None

    async def handle(self, request: Request, send: _Send, span: Span) -> Response:
        try:
            # Before anything is awaited: the event's slot may be announced again by a later message.
            after = self._session.events.use(event_of(request))
            with after.ended_after():
                response = await self._respond(request, send, after)
        except KvPoolError as error:
            note_end(span, self._name, request, Response(error=item_error_to_proto(error)))
            raise
        note_end(span, self._name, request, response)
        return response

    def refused(self, request: Request) -> None:
        if self._opened.done():  # its event's slot is free again
            with contextlib.suppress(KvPoolError):
                self._session.events.use(event_of(request)).end()

    def span(self, request: Request) -> Span:
        return request_span(self._tracer, self._session, request)

    async def ended(self) -> KvPoolError:
        # Shielded: a waiter that is cancelled must not cancel the futures.
        session = await asyncio.shield(self._opened)
        return await asyncio.shield(session.ended)

    async def end(self, end: End) -> None:
        if end.abnormal:
            self._metrics.abnormal_session_ends.inc()
            _log.warning("engine session ended abnormally: %s", end.error, extra=fields(engine=self._name))
        if self._opened.done():
            await self._session.close()

    # Inside

    @property
    def _session(self) -> EngineSession:
        return self._opened.result()

    @property
    def _name(self) -> str:
        return self._session.engine_name if self._opened.done() else "(unregistered)"

    async def _respond(self, request: Request, send: _Send, after: UsedEvent) -> Response:
        match request.WhichOneof("kind"):
            case "match":
                hashes = hashes_from_bytes(request.match.chunk_hashes)
                return Response(match=match_to_proto(await self._session.match(hashes, request.match.held_chunks)))
            case "store":
                return await self._store(request, send, after)
            case "lease":
                return await self._lease(request)
            case _:
                return await self._load(request, send, after)

    async def _store(self, request: Request, send: _Send, after: UsedEvent) -> Response:
        span, late = span_from_proto(request.store), list[asyncio.TimerHandle]()

        def report_copied_out(chunk_count: int) -> None:
            send(Response(gathered=gpuagent_pb2.EngineGathered(chunk_count=chunk_count)))

        async def ask_still_valid(chunk_count: int) -> bool:
            if not request.store.keeps_blocks:
                return await self._ask_still_valid(request.request_id, chunk_count, report_copied_out)
            if chunk_count == span.chunk_count:
                late.append(asyncio.get_running_loop().call_later(COPIED_OUT_AFTER_S, report_copied_out, chunk_count))
            return True

        try:
            outcome = await self._session.store(request.request_id, span, ask_still_valid, after)
        finally:
            for timer in late:
                timer.cancel()
        return Response(store_done=store_done_to_proto(outcome))

    async def _load(self, request: Request, send: _Send, after: UsedEvent) -> Response:
        load = request.load
        wait_s = load.wait_ms / 1e3 if load.wait_ms > 0 else DEFAULT_LOAD_WAIT_S

        def report(layers: int, failed: Sequence[int]) -> None:
            if not load.no_progress:
                progress = gpuagent_pb2.EngineLoadProgress(layers_loaded=layers, failed_chunks=failed)
                send(Response(load_progress=progress))

        span, speed_s = span_from_proto(load), compute_speed_from_proto(load)
        outcome = await self._session.load(
            request.request_id,
            span,
            wait_s,
            report,
            after,
            compute_s_per_token=speed_s,
            from_gpu=load.from_gpu,
            by_layer=not load.no_progress,
        )
        return Response(load_done=load_done_to_proto(outcome))

    async def _lease(self, request: Request) -> Response:
        span, hold_s = leased_from_proto(request.lease), request.lease.hold_ms / 1e3
        outcome = await self._session.lease(request.request_id, span, hold_s, hold_only=request.lease.hold_only)
        held = gpuagent_pb2.EngineLeaseHeld(held_chunks=outcome.held_chunks, staged_chunks=outcome.staged_chunks)
        return Response(lease_held=held)

    async def _ask_still_valid(
        self, request_id: int, chunk_count: int, report_copied_out: Callable[[int], None]
    ) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = (chunk_count, answer)
        report_copied_out(chunk_count)
        try:
            async with asyncio.timeout(self._config.kept_timeout_ms / 1e3):
                return await answer
        except TimeoutError:
            return False
        finally:
            del self._asked[request_id]

    def _note_still_valid(self, request_id: int, message: gpuagent_pb2.EngineKept) -> None:
        asked = self._asked.get(request_id)
        if asked is not None and asked[0] == message.chunk_count and not asked[1].done():
            asked[1].set_result(message.kept)

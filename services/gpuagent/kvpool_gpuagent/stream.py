"""One engine's session stream: requests in, answers out, requests of the same session at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvpool.core.errors import InvalidRequest, KvPoolError, Overloaded, Stopped
from kvpool.core.ipc import EngineEvent
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import hashes_from_bytes, item_error_to_proto
from kvpool.wire.convert_ipc import engine_event_from_proto, engine_event_to_proto
from kvpool.wire.versions import versions_from_proto
from kvpool_gpuagent.events import UsedEvent
from kvpool_gpuagent.listening import Listener
from kvpool_gpuagent.messages import (
    compute_speed_from_proto,
    event_of,
    leased_from_proto,
    load_done_to_proto,
    match_to_proto,
    span_from_proto,
    store_done_to_proto,
)
from kvpool_gpuagent.outbox import Outbox
from kvpool_gpuagent.registering import Registrar
from kvpool_gpuagent.request_spans import request_span, tell_end
from kvpool_gpuagent.session import EngineSession
from kvpool_server.logs import fields, note_request

_log = logging.getLogger(__name__)

DEFAULT_LOAD_WAIT_S = 30.0
FLUSH_S = 2.0  # for a client that reads to get its last answers
_REQUESTS_PER_PLACE = 2  # matches ride along: so many requests are worked on for each load or store that may run

_NOT_READY = "wait for `ready` before the first request"

Request = gpuagent_pb2.EngineRequest
Response = gpuagent_pb2.EngineResponse


class EngineStream:
    """Serves one EngineSession call. When `serve` ends nothing touches the engine's memory any more."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar, self._config = registrar, registrar.engine.config
        self._metrics, self._tracer = registrar.engine.metrics, registrar.engine.tracer
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: dict[int, tuple[int, asyncio.Future[bool]]] = {}
        self._session: EngineSession | None = None
        self._registering: asyncio.Task[None] | None = None
        self._listener = Listener(self._config.heartbeat_interval_ms / 1e3, self._left)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: KvPoolError | None = None
        self._outbox: Outbox[Response]
        self._ending: asyncio.Future[None] | None = None

    async def serve(self, requests: AsyncIterator[Request], write: Callable[[Response], Awaitable[None]]) -> None:
        """Until the engine closes, leaves or is silent. Raises the error that ends the stream."""
        self._outbox = Outbox(write, lambda: self._left(Overloaded("the engine does not read its answers")))
        reader = asyncio.ensure_future(self._read_all(requests))
        self._listener.start()
        try:
            await asyncio.wait((reader, self._over), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._left(Stopped("the engine's call was cancelled"))
            raise
        finally:
            # Whoever ends the stream (engine, cancelled call, we ourselves): the memory is let go before it is over.
            self._listener.stop()
            self._ending = asyncio.ensure_future(self._end(reader))
            await asyncio.shield(self._ending)
        if self._failure is not None:
            raise self._failure

    def end(self, error: KvPoolError) -> None:
        """End the stream with an error, soon."""
        if self._failure is None:
            self._failure = error
        if not self._over.done():
            self._over.set_result(None)

    async def _end(self, reader: asyncio.Future[None]) -> None:
        reader.cancel()
        if self._registering is not None:
            self._registering.cancel()
        await asyncio.gather(reader, self._let_go(), return_exceptions=True)
        await self._outbox.close(FLUSH_S)

    async def _let_go(self) -> None:
        """Idempotent, and waits for whatever else does the same."""
        if self._registering is not None:
            await asyncio.wait((self._registering,))
        if self._session is not None:
            await self._session.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _read_all(self, requests: AsyncIterator[Request]) -> None:
        try:
            while True:
                request = await anext(requests)
                self._listener.heard()
                if request.WhichOneof("kind") == "close":
                    break
                self._dispatch(request)
            await self._close_normally(request.request_id)
        except StopAsyncIteration:
            # An engine that is killed looks like this too, so only an explicit close counts as normal.
            self._left(Stopped("the engine left without closing its session"))
        except KvPoolError as error:
            self.end(error)
        except Exception as error:
            _log.exception("an engine's requests could not be read")
            self._left(Stopped(f"the engine's requests could not be read ({error})"))

    def _left(self, error: KvPoolError) -> None:
        if self._failure is not None:
            return
        self._metrics.abnormal_session_ends.inc()
        _log.warning("engine session ended abnormally: %s", error, extra=fields(engine=self._name()))
        self.end(error)

    async def _close_normally(self, request_id: int) -> None:
        self._listener.stop()
        if self._registering is not None:
            self._registering.cancel()
        await self._let_go()
        self._send(request_id, Response(closed=gpuagent_pb2.EngineClose()))

    def _dispatch(self, request: Request) -> None:
        match request.WhichOneof("kind"):
            case "register" if self._registering is None:
                self._registering = asyncio.ensure_future(self._register(request))
            case _ if self._registering is None:
                raise InvalidRequest("the first message of an engine session must be `register`")
            case "match" | "store" | "load" | "lease":
                self._start(request)
            case "kept":
                self._answer_kept(request.request_id, request.kept)
            case "cancel":
                if self._session is not None:
                    # After the first step of a request that came just before it: its task was made earlier.
                    loop = asyncio.get_running_loop()
                    loop.call_soon(self._session.cancel, request.cancel.target_request_id)
            case "heartbeat":
                self._send(0, Response(heartbeat=gpuagent_pb2.EngineHeartbeat()))
            case "event_recorded":
                self._announce(request)
            case kind:
                self._refuse(
                    request.request_id, InvalidRequest(f"message {kind or 'without a known kind'} is not expected here")
                )

    async def _register(self, request: Request) -> None:
        register = request.register

        def send(response: Response) -> None:
            self._send(request.request_id, response)

        def on_session(session: EngineSession) -> None:
            self._session = session

        try:
            await self._registrar.register(register, send, on_session, self.end, self._event_waited)
        except KvPoolError as error:
            self.end(error)
        except Exception:
            _log.exception("an engine could not be registered", extra=fields(engine=register.engine_name))
            self.end(KvPoolError("internal error in the agent; its log has the details"))
        else:
            peer = versions_from_proto(register.version)
            told = fields(engine=register.engine_name, keyspace=register.keyspace_name, peer=str(peer))
            _log.info("engine registered", extra=told)

    def _start(self, request: Request) -> None:
        if self._session is None:
            self._refuse(request.request_id, InvalidRequest(_NOT_READY))
            return
        try:
            # Before anything is awaited: the event's slot may be announced again by a later message.
            after = self._session.events.use(event_of(request))
        except KvPoolError as error:
            self._refuse(request.request_id, error)
            return
        if len(self._tasks) >= _REQUESTS_PER_PLACE * self._config.max_running_requests:
            # Never by reading no further: what the running ones wait for (`kept`) comes on the same stream.
            self._refuse(request.request_id, Overloaded(f"{len(self._tasks)} requests are being worked on"))
            after.end()
        else:
            task = asyncio.ensure_future(self._answer(self._session, request, after))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _announce(self, request: Request) -> None:
        try:
            if self._session is None:
                raise InvalidRequest(_NOT_READY)
            self._session.events.announce(engine_event_from_proto(request.event_recorded))
        except KvPoolError as error:
            self._refuse(request.request_id, error)

    def _event_waited(self, event: EngineEvent) -> None:
        self._send(0, Response(event_waited=engine_event_to_proto(event)))

    async def _answer(self, session: EngineSession, request: Request, after: UsedEvent) -> None:
        note_request(request.request_id)
        with request_span(self._tracer, session, request) as span:
            try:
                with after.ended_after():
                    response = await self._respond(session, request, after)
            except KvPoolError as error:
                span.fail(error)
                response = _refusal(error)
            except Exception:
                _log.exception("engine request failed", extra=fields(engine=self._name()))
                internal = KvPoolError("internal error in the agent; its log has the details, recompute and go on")
                span.fail(internal)
                response = _refusal(internal)
            tell_end(span, self._name(), request, response)
        self._send(request.request_id, response)

    async def _respond(self, session: EngineSession, request: Request, after: UsedEvent) -> Response:
        match request.WhichOneof("kind"):
            case "match":
                return await self._match(session, request.match)
            case "store":
                return await self._store(session, request, after)
            case "lease":
                return await self._lease(session, request)
            case _:
                return await self._load(session, request, after)

    async def _match(self, session: EngineSession, match: gpuagent_pb2.EngineMatchRequest) -> Response:
        found = await session.match(hashes_from_bytes(match.chunk_hashes), match.held_chunks)
        return Response(match=match_to_proto(found))

    async def _store(self, session: EngineSession, request: Request, after: UsedEvent) -> Response:
        async def ask_kept(chunk_count: int) -> bool:
            return await self._ask_kept(request.request_id, chunk_count)

        outcome = await session.store(request.request_id, span_from_proto(request.store), ask_kept, after)
        return Response(store_done=store_done_to_proto(outcome))

    async def _load(self, session: EngineSession, request: Request, after: UsedEvent) -> Response:
        wait_s = request.load.wait_ms / 1e3 if request.load.wait_ms > 0 else DEFAULT_LOAD_WAIT_S

        def report(layers: int, failed: Sequence[int]) -> None:
            progress = gpuagent_pb2.EngineLoadProgress(layers_loaded=layers, failed_chunks=failed)
            self._send(request.request_id, Response(load_progress=progress))

        span, speed_s = span_from_proto(request.load), compute_speed_from_proto(request.load)
        outcome = await session.load(request.request_id, span, wait_s, report, after, compute_s_per_token=speed_s)
        return Response(load_done=load_done_to_proto(outcome))

    async def _lease(self, session: EngineSession, request: Request) -> Response:
        span, hold_s = leased_from_proto(request.lease), request.lease.hold_ms / 1e3
        outcome = await session.lease(request.request_id, span, hold_s, hold_only=request.lease.hold_only)
        held = gpuagent_pb2.EngineLeaseHeld(held_chunks=outcome.held_chunks, staged_chunks=outcome.staged_chunks)
        return Response(lease_held=held)

    async def _ask_kept(self, request_id: int, chunk_count: int) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._kept[request_id] = (chunk_count, answer)
        self._send(request_id, Response(gathered=gpuagent_pb2.EngineGathered(chunk_count=chunk_count)))
        try:
            async with asyncio.timeout(self._config.kept_timeout_ms / 1e3):
                return await answer
        except TimeoutError:
            return False
        finally:
            del self._kept[request_id]

    def _answer_kept(self, request_id: int, message: gpuagent_pb2.EngineKept) -> None:
        asked = self._kept.get(request_id)
        if asked is not None and asked[0] == message.chunk_count and not asked[1].done():
            asked[1].set_result(message.kept)

    def _refuse(self, request_id: int, error: KvPoolError) -> None:
        self._send(request_id, _refusal(error))

    def _send(self, request_id: int, response: Response) -> None:
        response.request_id = request_id
        self._outbox.put(response)

    def _name(self) -> str:
        return self._session.engine_name if self._session is not None else "(unregistered)"


def _refusal(error: KvPoolError) -> Response:
    return Response(error=item_error_to_proto(error))

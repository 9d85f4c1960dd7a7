"""One engine's session stream: requests in, answers out, requests of the same session at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError
from kvpool.v1 import common_pb2, gpuagent_pb2
from kvpool.wire.convert import item_error_to_proto
from kvpool_gpuagent.descriptors import DescriptorDesk
from kvpool_gpuagent.engine import EngineSession, GpuAgentEngine
from kvpool_gpuagent.messages import (
    handles_from_proto,
    layout_from_register,
    load_done_to_proto,
    match_to_proto,
    span_from_proto,
    spec_from_register,
    store_done_to_proto,
)
from kvpool_server.logs import fields

_log = logging.getLogger(__name__)

OUTBOX_LIMIT = 1024
OFFER_TIMEOUT_S = 30.0
DEFAULT_LOAD_WAIT_S = 30.0

Response = gpuagent_pb2.EngineResponse


class EngineStream:
    """Serves one EngineSession call. When `serve` ends nothing touches the engine's memory any more."""

    def __init__(self, engine: GpuAgentEngine, desk: DescriptorDesk, descriptor_socket: Path) -> None:
        self._engine, self._desk, self._descriptor_socket = engine, desk, descriptor_socket
        self._outbox: asyncio.Queue[Response | None] = asyncio.Queue(OUTBOX_LIMIT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: dict[int, tuple[int, asyncio.Future[bool]]] = {}
        self._session: EngineSession | None = None
        self._failure: KvPoolError | None = None

    async def serve(self, requests: AsyncIterator[gpuagent_pb2.EngineRequest]) -> AsyncIterator[Response]:
        """Answers of one session. Raises the error that ends the stream."""
        reader = asyncio.ensure_future(self._read_all(requests))
        try:
            while (response := await self._outbox.get()) is not None:
                yield response
            if self._failure is not None:
                raise self._failure
        finally:
            # Whoever ends the stream (engine, cancelled call, our own error): the memory is let go before it is over.
            await asyncio.shield(asyncio.ensure_future(self._end(reader)))

    async def _read_all(self, requests: AsyncIterator[gpuagent_pb2.EngineRequest]) -> None:
        try:
            await self._register(await self._next(requests))
            while (request := await self._next(requests)).WhichOneof("kind") != "close":
                await self._dispatch(request)
            await self._close_normally(request.request_id)
        except KvPoolError as error:
            self._failure = error
        except StopAsyncIteration:
            # An engine that is killed looks like this too, so only an explicit close counts as normal.
            self._engine.metrics.abnormal_session_ends.inc()
            _log.warning("an engine left without closing its session", extra=fields(engine=self._name()))
        finally:
            await self._outbox.put(None)

    async def _next(self, requests: AsyncIterator[gpuagent_pb2.EngineRequest]) -> gpuagent_pb2.EngineRequest:
        silence_s = self._engine.config.heartbeat_interval_ms * 4 / 1e3
        try:
            async with asyncio.timeout(silence_s):
                request = await anext(requests)
        except TimeoutError:
            self._engine.metrics.abnormal_session_ends.inc()
            raise DeadlineExceeded(
                f"engine {self._name()} was silent for {silence_s:g} s; its session is over"
            ) from None
        return request

    async def _register(self, request: gpuagent_pb2.EngineRequest) -> None:
        if request.WhichOneof("kind") != "register":
            raise InvalidRequest("the first message of an engine session must be `register`")
        register, config = request.register, self._engine.config
        handles = handles_from_proto(register)
        spec = spec_from_register(register)
        session = await self._engine.open_session(
            register.engine_name,
            register.keyspace_name,
            spec,
            layout_from_register(register),
            load_only=register.load_only,
            previous_session_id=register.previous_session_id,
        )
        self._session = session
        inbox = self._desk.open(handles.sizes_bytes)
        try:
            await self._send(
                request.request_id,
                registered=gpuagent_pb2.EngineRegistered(
                    session_id=session.session_id,
                    keyspace_id=session.rank.keyspace,
                    hash_key=session.hash_key,
                    grid=common_pb2.ShardGrid(
                        layer_groups=session.rank.grid.layer_groups, head_groups=session.rank.grid.head_groups
                    ),
                    shards=session.rank.shards,
                    descriptor_socket=str(self._descriptor_socket),
                    descriptor_token=inbox.token,
                    heartbeat_interval_ms=config.heartbeat_interval_ms,
                ),
            )
            await session.map_cache(handles.with_descriptors(await inbox.take(OFFER_TIMEOUT_S)))
        finally:
            self._desk.drop(inbox)
        ready = gpuagent_pb2.EngineReady(device=self._engine.device.name, max_request_chunks=config.max_request_chunks)
        await self._send(request.request_id, ready=ready)
        _log.info("engine registered", extra=fields(engine=register.engine_name, keyspace=register.keyspace_name))

    async def _dispatch(self, request: gpuagent_pb2.EngineRequest) -> None:
        match request.WhichOneof("kind"):
            case "match" | "store" | "load":
                if len(self._tasks) >= 2 * self._engine.config.max_running_requests:
                    # The stream itself pushes back: nothing more is read until one request has ended.
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.ensure_future(self._answer(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "kept":
                self._answer_kept(request.request_id, request.kept)
            case "cancel":
                assert self._session is not None
                self._session.cancel(request.cancel.target_request_id)
            case "heartbeat":
                await self._send(0, heartbeat=gpuagent_pb2.EngineHeartbeat())
            case kind:
                error = InvalidRequest(f"message {kind or 'without a known kind'} is not expected here")
                await self._send(request.request_id, error=item_error_to_proto(error))

    async def _answer(self, request: gpuagent_pb2.EngineRequest) -> None:
        try:
            match request.WhichOneof("kind"):
                case "match":
                    await self._match(request)
                case "store":
                    await self._store(request)
                case _:
                    await self._load(request)
        except KvPoolError as error:
            await self._send(request.request_id, error=item_error_to_proto(error))
        except Exception:
            _log.exception("engine request failed", extra=fields(engine=self._name()))
            internal = KvPoolError("internal error in the agent; its log has the details, recompute and go on")
            await self._send(request.request_id, error=item_error_to_proto(internal))

    async def _match(self, request: gpuagent_pb2.EngineRequest) -> None:
        assert self._session is not None
        packed = request.match.chunk_hashes
        if len(packed) % 16:
            raise InvalidRequest(f"chunk_hashes must be a multiple of 16 bytes, got {len(packed)}")
        hashes = [packed[start : start + 16] for start in range(0, len(packed), 16)]
        found = await self._session.match(hashes, request.match.held_chunks)
        await self._send(request.request_id, match=match_to_proto(found))

    async def _store(self, request: gpuagent_pb2.EngineRequest) -> None:
        assert self._session is not None
        store, request_id = request.store, request.request_id
        span = span_from_proto(store, chain_head=store.chain_head_hash)

        async def ask_kept(chunk_count: int) -> bool:
            return await self._ask_kept(request_id, chunk_count)

        outcome = await self._session.store(request_id, span, ask_kept)
        await self._send(request_id, store_done=store_done_to_proto(outcome))

    async def _load(self, request: gpuagent_pb2.EngineRequest) -> None:
        assert self._session is not None
        load, request_id = request.load, request.request_id
        wait_s = load.wait_ms / 1e3 if load.wait_ms > 0 else DEFAULT_LOAD_WAIT_S

        def report(layers: int, failed: Sequence[int]) -> None:
            progress = gpuagent_pb2.EngineLoadProgress(layers_loaded=layers, failed_chunks=failed)
            response = Response(request_id=request_id, load_progress=progress)
            if self._outbox.qsize() < OUTBOX_LIMIT // 2:  # a slow reader loses progress, never its `done`
                self._outbox.put_nowait(response)

        outcome = await self._session.load(request_id, span_from_proto(load, chain_head=b""), wait_s, report)
        await self._send(request_id, load_done=load_done_to_proto(outcome))

    async def _ask_kept(self, request_id: int, chunk_count: int) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._kept[request_id] = (chunk_count, answer)
        await self._send(request_id, gathered=gpuagent_pb2.EngineGathered(chunk_count=chunk_count))
        try:
            async with asyncio.timeout(self._engine.config.kept_timeout_ms / 1e3):
                return await answer
        except TimeoutError:
            return False
        finally:
            del self._kept[request_id]

    def _answer_kept(self, request_id: int, message: gpuagent_pb2.EngineKept) -> None:
        asked = self._kept.get(request_id)
        if asked is not None and asked[0] == message.chunk_count and not asked[1].done():
            asked[1].set_result(message.kept)

    async def _close_normally(self, request_id: int) -> None:
        await self._let_go()
        await self._send(request_id, closed=gpuagent_pb2.EngineClose())

    async def _end(self, reader: asyncio.Future[None]) -> None:
        reader.cancel()
        draining = asyncio.ensure_future(self._drain_outbox())
        try:
            await asyncio.wait([reader])
            await self._let_go()
        finally:
            draining.cancel()

    async def _let_go(self) -> None:
        for _, answer in self._kept.values():
            if not answer.done():
                answer.set_result(False)
        if self._session is not None:
            await self._session.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _drain_outbox(self) -> None:
        """Nobody reads any more, and nobody must wait to write."""
        while True:
            await self._outbox.get()

    async def _send(self, request_id: int, **kind: object) -> None:
        await self._outbox.put(Response(request_id=request_id, **kind))  # type: ignore[arg-type]

    def _name(self) -> str:
        return self._session.engine_name if self._session is not None else "(unregistered)"

"""An engine rank's session with its agent: match, lease, load, store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.client.channel import open_channel
from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import MatchResult, lease_to_proto, load_to_proto, match_from_proto, store_to_proto
from kvpool.client.engine_registration import EngineRegistration, OfferFd, RegistrationReply, lend, register_to_proto
from kvpool.client.engine_requests import LeaseHandle, LoadRequest, StoreRequest
from kvpool.client.fds import offer_fd
from kvpool.client.hashing import Prompt
from kvpool.client.session_stream import SessionStream
from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, ServiceUnavailable
from kvpool.core.ipc import EngineEvent
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.retention import Retention
from kvpool.v1 import gpuagent_pb2
from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceStub
from kvpool.wire.convert import HASH_BYTES, check_id, check_length, hashes_to_bytes
from kvpool.wire.convert_engine import (
    BlockIds,
    block_ids_to_bytes,
    engine_event_from_proto,
    engine_event_to_proto,
)
from kvpool.wire.versions import check_peer_version

if TYPE_CHECKING:
    from kvpool.client.engine_events import EventSlots
    from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceAsyncStub

_Request = gpuagent_pb2.EngineRequest
_Response = gpuagent_pb2.EngineResponse


class EngineSession:
    """One session from `register` to `close` or to its break. Belongs to one event loop.

    When it breaks, every pending and later call raises at once, but blocks stay held (`released` is not set) until the
    agent's mapping of the engine's memory is gone: the agent has let go of it, or its process has ended. A successor
    made by `reopen` ends the holds too if its agent had the old session: it answers after all work of that has ended.
    """

    def __init__(self, plan: EngineRegistration, config: ClientConfig, offer: OfferFd) -> None:
        """Use `open`."""
        self._plan, self._config, self._offer = plan, config, offer
        self._hold = plan.new_hold()
        self._holds: set[StoreRequest | LoadRequest] = set()
        self._releasing: asyncio.Task[None] | None = None
        self.released = asyncio.Event()  # after the end: the agent touches no block of this session any more
        self._registered, self._ready = gpuagent_pb2.EngineRegistered(), gpuagent_pb2.EngineReady()
        channel = open_channel(plan.endpoint, config)
        stub: GpuAgentServiceAsyncStub = GpuAgentServiceStub(channel)
        self._stream: SessionStream[_Request, _Response] = SessionStream(
            stub.EngineSession(metadata=config.metadata),
            config,
            name="engine session",
            channel=channel,
            on_broken=self._on_broken,
            on_unasked=self._on_unasked,
        )

    @classmethod
    async def open(cls, plan: EngineRegistration, config: ClientConfig, *, offer: OfferFd = offer_fd) -> EngineSession:
        """Register and lend the engine's memory. raises: KeyspaceMismatch, PartitionRefused, GeometryUnsupported,
        InvalidRequest, NotServed, ServiceUnavailable, DeadlineExceeded."""
        plan.check()
        session = cls(plan, config, offer)
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                await session._register()
        except BaseException as error:
            await session._stream.abort("the engine was not registered")
            await session._stop_watching()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"agent {plan.endpoint} did not register this engine within {config.connect_timeout_s:g} s"
                ) from None
            raise
        return session

    async def _register(self) -> None:
        registration = RegistrationReply(self._plan.endpoint)
        await self._stream.submit(_Request(register=register_to_proto(self._plan)), registration)
        registered = self._registered = await registration.registered
        check_peer_version(registered.version, "the agent")
        check_id(registered.session_id, "session_id")
        check_length(registered.hash_key, 32, "hash_key")
        heartbeat = _Request(heartbeat=gpuagent_pb2.EngineHeartbeat())
        self._stream.start_heartbeats(heartbeat, registered.heartbeat_interval_ms)
        await asyncio.to_thread(self._hold.agent_at, registered.descriptor_socket)
        for number, region in enumerate(self._hold.lent):
            await asyncio.to_thread(lend, self._offer, registered, number, region, self._config.connect_timeout_s)
        self._ready = await registration.ready
        if self._ready.reads_batched:
            self._stream.start_batching()

    @property
    def session_id(self) -> bytes:
        """16 bytes."""
        return self._registered.session_id

    @property
    def link_bytes_per_s(self) -> float:
        """What a plain copy from the host's memory to the device reached when the agent started; 0 if not known."""
        return self._ready.link_bytes_per_s

    @property
    def keyspace(self) -> bytes:
        """16-byte keyspace id."""
        return self._registered.keyspace_id

    @property
    def hash_key(self) -> bytes:
        """32-byte key of the chunk hash."""
        return self._registered.hash_key

    @property
    def spec(self) -> KeyspaceSpec:
        """What the keyspace means."""
        return self._plan.spec

    @property
    def shards(self) -> int:
        """Bitmap of the shards this rank owns."""
        return self._registered.shards

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._ready.device

    @property
    def max_request_chunks(self) -> int:
        """Chunks of one match, store or load at most; 0 means no limit was named."""
        return self._ready.max_request_chunks

    @property
    def blocks_per_chunk(self) -> int:
        """Engine blocks of one chunk."""
        return self._plan.spec.chunk_tokens // self._plan.layout.block_tokens

    @property
    def is_full(self) -> bool:
        """Whether a request waits for earlier ones before it is sent."""
        return self._stream.is_full

    @property
    def broken(self) -> asyncio.Event:
        """Set when the session has ended, for whatever reason."""
        return self._stream.broken

    @property
    def failure(self) -> KvPoolError | None:
        """What ended the session."""
        return self._stream.failure

    async def match(
        self, chunk_hashes: Sequence[bytes] | bytes, held_chunks: int = 0, *, timeout_s: float | None = None
    ) -> MatchResult:
        """How much of a chain, from chunk 0 on, can be had. chunk_hashes: one by one, or [C * 16] bytes.

        raises: StoreUnavailable, DeadlineExceeded, ...
        """
        packed = chunk_hashes if isinstance(chunk_hashes, bytes) else hashes_to_bytes(chunk_hashes)
        request = gpuagent_pb2.EngineMatchRequest(chunk_hashes=packed, held_chunks=held_chunks)
        limit_s = self._config.match_timeout_s if timeout_s is None else timeout_s
        return match_from_proto((await self._stream.ask(_Request(match=request), limit_s)).match)

    async def store(
        self,
        span: ChunkRange,
        *,
        retention: Retention | None = None,
        kept: Callable[[int], bool | Awaitable[bool]] | None = None,
        after: EngineEvent | None = None,
    ) -> StoreRequest:
        """Begin a store; its blocks are held until the handle says otherwise. `kept`: see StoreRequest.

        after: GPU work that computes the blocks, an event of the plan's slots that was recorded; it stays the caller's
        to give back. raises: InvalidRequest for an event that is not taken.
        """
        handle = StoreRequest(self._stream.send_soon, span.chunks, kept)
        store = store_to_proto(span, retention, after, keeps_blocks=kept is None)
        await self._begin(_Request(store=store), handle, after)
        return handle

    async def load(
        self,
        span: ChunkRange,
        *,
        wait_s: float,
        on_progress: Callable[[int, tuple[int, ...]], None] | None = None,
        after: EngineEvent | None = None,
        compute_us_per_token: float = 0.0,
        from_gpu: bool = False,
    ) -> LoadRequest:
        """Begin a load, as `store` does. after: GPU work that may still use the blocks.

        compute_us_per_token: what the engine would need to compute them, for the agent's metrics; 0 if unknown.
        from_gpu: a match has named GPU caches of other ranks: they are looked up first."""
        handle = LoadRequest(self._stream.send_soon, span.chunks, on_progress)
        wait_ms = max(1, round(wait_s * 1e3))
        load = load_to_proto(
            span, wait_ms, after, compute_us_per_token, no_progress=on_progress is None, from_gpu=from_gpu
        )
        await self._begin(_Request(load=load), handle, after)
        return handle

    def announce_cached(self, chunk_hashes: bytes, block_ids: BlockIds, generations: BlockIds) -> None:
        """Say that chunks lie in blocks of the engine's cache; there is no answer. Lost when the session cannot send.

        block_ids, generations: [C, blocks of a chunk], the generations that the blocks had when their bytes were known
        to be the chunks'.
        """
        blocks, known = block_ids_to_bytes(block_ids), block_ids_to_bytes(generations)
        count = len(chunk_hashes) // HASH_BYTES
        width, most = len(blocks) // max(1, count), self.max_request_chunks or max(1, count)
        for first in range(0, count, most):
            end = first + most
            cached = gpuagent_pb2.EngineCached(
                chunk_hashes=chunk_hashes[first * HASH_BYTES : end * HASH_BYTES],
                block_ids=blocks[first * width : end * width],
                generations=known[first * width : end * width],
            )
            with contextlib.suppress(KvPoolError):  # not sent: others find less
                self._stream.send(_Request(cached=cached))

    async def lease(self, chain: Prompt, chunks: range, *, hold_s: float, hold_only: bool = False) -> LeaseHandle:
        """Begin to keep chunks of a prompt in staging memory until the lease is ended, for hold_s at most.

        hold_only: leave alone what cannot be kept, rather than have it brought there from disk and other nodes.

        More than `max_request_chunks` are refused. raises: what ended the session."""
        handle = LeaseHandle(self._stream.send_soon, self._stream.broken)
        lease = lease_to_proto(chain, chunks, max(1, round(hold_s * 1e3)), hold_only=hold_only)
        # As in `_begin`: a cancelled caller has no request unknown to it.
        handle.request_id = await self._stream.submit(_Request(lease=lease), handle)
        return handle

    def give_back(self, event: EngineEvent | None) -> None:
        """No further request names the event; see EventSlots. None does nothing."""
        if event is not None and self._plan.events is not None:
            self._plan.events.give_back(event)

    def announce(self, event: EngineEvent) -> None:
        """Tell the agent of a recording that a call beside this stream will name. raises: InvalidRequest."""
        if self._events.announce(event, self):
            self._stream.send_soon(_Request(event_recorded=engine_event_to_proto(event)))

    async def _begin(self, message: _Request, handle: StoreRequest | LoadRequest, after: EngineEvent | None) -> None:
        announced: list[_Request] = []

        def announce() -> Sequence[_Request]:
            if after is not None and self._events.announce(after, self):
                recorded = engine_event_to_proto(after)
                announced.append(_Request(request_id=message.request_id, event_recorded=recorded))
            return announced

        try:
            # Nothing is awaited between sending and returning, so a cancelled caller has no request unknown to it.
            handle.request_id = await self._stream.submit(message, handle, announce)
        except KvPoolError:
            if after is not None and announced:
                self._events.retract(after, self)
            raise
        self._holds = {known for known in self._holds if not known.released} | {handle}

    @property
    def _events(self) -> EventSlots:
        """raises: InvalidRequest for an engine without events."""
        if self._plan.events is None:
            raise InvalidRequest("this engine registered no events: name none")
        return self._plan.events

    async def close(self) -> bool:
        """End the session: running requests are cancelled. False if the agent did not confirm.

        `released` says whether the holds have ended; it may not be set when the agent neither confirms nor lets go.
        """
        ended_well = await self._stream.finish(_Request(close=gpuagent_pb2.EngineClose()))
        await self._stream.abort("the session was closed")
        if ended_well:
            self._release()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.call_timeout_s):
                await self.released.wait()
        await self._stop_watching()
        return ended_well

    async def reopen(self) -> EngineSession:
        """End this session and register the same engine again; may be repeated after a failure. raises: as `open`."""
        await self._stream.abort("the session is reopened")
        plan = replace(self._plan, previous_session_id=self.session_id)
        successor = await EngineSession.open(plan, self._config, offer=self._offer)
        if not self.released.is_set() and self._hold.ends_with_successor:
            self._release()
        return successor

    def _on_broken(self, error: KvPoolError) -> None:
        if self._releasing is None and not self.released.is_set():
            self._releasing = asyncio.create_task(self._watch_release(), name="engine session release")

    def _on_unasked(self, response: _Response) -> None:
        if response.HasField("event_waited") and self._plan.events is not None:
            self._plan.events.waited(engine_event_from_proto(response.event_waited), self)

    async def _stop_watching(self) -> None:
        """The holds end with `reopen` or never."""
        if self._releasing is not None:
            self._releasing.cancel()
            await asyncio.gather(self._releasing, return_exceptions=True)
        self._hold.close()

    async def _watch_release(self) -> None:
        await self._hold.ended()
        self._release()

    def _release(self) -> None:
        self.released.set()
        if self._releasing is not None and self._releasing is not asyncio.current_task():
            self._releasing.cancel()
        for handle in self._holds:
            handle.fail(ServiceUnavailable("the session ended"))
            handle.release()
        self._holds.clear()
        if self._plan.events is not None:
            self._plan.events.end_session(self)
        self._hold.close()
